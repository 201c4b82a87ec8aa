# SPDX-License-Identifier: Apache-2.0
"""The series of the outbox."""

from typing import Literal

from prometheus_client import Counter, Gauge

#: What is sent: an artifact of a round, or a callback row (a verdict, a job's result).
Content = Literal["artifact", "callback"]
#: Why a post was not accepted; ``address`` is one that the settings forbid.
FailureKind = Literal["address", "connection", "timeout", "http_3xx", "http_4xx", "http_5xx"]
_FAILURES: tuple[FailureKind, ...] = ("address", "connection", "timeout", "http_3xx", "http_4xx", "http_5xx")

FORWARDED = Counter("poc_gateway_forwarded", "Results that their receiver has accepted", ["content"])
DEAD = Counter("poc_gateway_dead", "Results that their receiver refused for good", ["content"])
FAILURES = Counter("poc_gateway_forward_failures", "Posts to receivers that were not accepted", ["kind"])
OPEN_CIRCUITS = Gauge("poc_gateway_open_circuits", "Receivers' hosts that cannot be reached, tried one post at a time")


def _begin_at_zero() -> None:
    # A series that appears with its first event hides that event from rate().
    content: Content
    for content in ("artifact", "callback"):
        FORWARDED.labels(content)
        DEAD.labels(content)
    for kind in _FAILURES:
        FAILURES.labels(kind)


_begin_at_zero()
