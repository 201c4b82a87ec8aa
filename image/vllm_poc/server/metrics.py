# SPDX-License-Identifier: Apache-2.0
"""The series ``poc_*`` on vLLM's ``/metrics``.

Plain instruments on the default registry, with gauges set when ``/metrics`` is asked for: a collector that looks things
up would not be seen where PROMETHEUS_MULTIPROC_DIR is set, since vLLM then answers from the instruments' files alone.
"""

from functools import partial
from typing import Literal

from prometheus_client import Counter, Gauge, Histogram

from vllm_poc.wire.answers import PowState
from vllm_poc.wire.messages import Protocol

#: What nonces are computed for: a round, or POST generate and validate.
Work = Literal["round", "request"]

_SLICE_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 30)
# Without a mode the multiprocess files would give each gauge a label for the process.
_Gauge = partial(Gauge, multiprocess_mode="mostrecent")

COMPUTED = Counter("poc_nonces_computed", "Nonces computed, those that are not finite included", ["protocol", "work"])
NOT_FINITE = Counter("poc_nonces_not_finite", "Nonces that stayed NaN or infinite", ["protocol", "work"])
VALID = Counter("poc_nonces_valid", "Valid nonces of rounds", ["protocol"])
DELIVERED = Counter("poc_results_delivered", "Results of rounds that are delivered")
REJECTED = Counter("poc_results_rejected", "Results of rounds that the receiver refused for good")
CALLBACKS = Counter("poc_callbacks", "Callback requests by outcome; those that failed are tried again", ["outcome"])
CALLBACKS_LOST = Counter("poc_callbacks_lost", "Callbacks outside of rounds, rejected even in part or given up")
HELD_BACK = Counter("poc_held_back_seconds", "Time that chat held PoC back")
SLICE = Histogram(
    "poc_slice_seconds", "Time of a slice, or of a part of one, from call to answer", buckets=_SLICE_BUCKETS
)
PROGRESS = _Gauge("poc_last_progress_timestamp_seconds", "Unix time of the last slice, or of a later round's start")
STATE = _Gauge("poc_state", "1 for the server's state, 0 for the others", ["state"])
PENDING = _Gauge("poc_results_pending", "Results of the round that wait for delivery")
QUEUED_JOBS = _Gauge("poc_queued_jobs", "Requests for named nonces that wait or are computed")
QUEUED_NONCES = _Gauge("poc_queued_nonces", "Nonces of these requests")


def count_nonces(protocol: Protocol, work: Work, *, computed: int, not_finite: int) -> None:
    """Count the nonces of a slice; ``not_finite`` is part of ``computed``."""
    COMPUTED.labels(protocol, work).inc(computed)
    NOT_FINITE.labels(protocol, work).inc(not_finite)


def _begin_at_zero() -> None:
    # A series that appears with its first event hides that event from rate().
    for protocol in Protocol:
        VALID.labels(protocol)
        count_nonces(protocol, "round", computed=0, not_finite=0)
        count_nonces(protocol, "request", computed=0, not_finite=0)
    for outcome in ("accepted", "refused", "failed"):
        CALLBACKS.labels(outcome)
    for state in PowState:
        STATE.labels(state).set(0)


_begin_at_zero()
