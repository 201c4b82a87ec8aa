# SPDX-License-Identifier: Apache-2.0
"""What runs in the pods: their answers to ``GET versions``, remembered for a while, and what they offer together.

A pod is asked again after a minute, since a server may be replaced where the API server shows no change. What it told
before counts for a while longer if it does not answer then: a busy server may be late once. A new server is asked at
once, and nothing of a pod that is gone is kept.

The ML node offers a scheme if every ready pod does. A stage may begin in any scheme that the chain has chosen, and the
whole of the ML node is then expected to compute it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from typing import NamedTuple

from poc_operator.clients.pods.reference_pods import PodVersions
from vllm_poc.wire.messages import Scheme

#: Seconds after which a pod is asked again.
ASK_AGAIN_SECONDS = 60.0
#: Seconds for which an answer counts while the pod gives no other one.
KNOWN_SECONDS = 300.0
#: Seconds after which a pod that did not answer is asked again: whoever asks waits for it.
RETRY_SECONDS = 15.0

#: A pod's uid, and the id of the container that serves.
Server = tuple[str, str]


class _Told(NamedTuple):
    versions: PodVersions
    since: float
    silent: float = -math.inf  # when it gave no answer


class PodVersionsCache:
    """Answers by server. ``clock`` returns seconds of any monotonic clock."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._told: dict[Server, _Told] = {}

    def due(self, servers: Collection[Server]) -> frozenset[Server]:
        """Return those of the servers that are to be asked."""
        now = self._clock()
        known = {
            server
            for server, told in self._told.items()
            if now < told.since + ASK_AGAIN_SECONDS or now < told.silent + RETRY_SECONDS
        }
        return frozenset(servers) - known

    def put(self, answers: Mapping[Server, PodVersions | None], *, servers: Collection[Server]) -> None:
        """Take new answers, None from servers that gave none, and forget every server but ``servers``."""
        now = self._clock()
        silent = {server for server, versions in answers.items() if versions is None} & self._told.keys()
        late = {server: self._told[server]._replace(silent=now) for server in silent}
        new = {server: _Told(versions, now) for server, versions in answers.items() if versions is not None}
        kept = {**self._told, **late, **new}
        self._told = {
            server: told for server, told in kept.items() if server in servers and told.since > now - KNOWN_SECONDS
        }

    def get(self, server: Server) -> PodVersions | None:
        """Return what the server told; None if it never did, or too long ago."""
        told = self._told.get(server)
        return told.versions if told is not None else None


def common_schemes(told: Sequence[PodVersions | None]) -> list[Scheme]:
    """Return the schemes that every pod offers. One that does not answer counts as one with the prefill scheme alone.

    Without pods there are none.
    """
    offers = [_offers(one) for one in told]
    return [scheme for scheme in Scheme if offers and all(scheme in offer for offer in offers)]


def plugin_release(told: Sequence[PodVersions | None]) -> str | None:
    """Return the release of the network's plugin in the pod that offers least; None if none names its release.

    Clients conclude from it which schemes there are, so it must not promise more than `common_schemes`.
    """
    least = min((len(_offers(one)) for one in told), default=0)
    named = (one.gonka_poc_version for one in told if one is not None and len(one.offers) == least)
    return next(filter(None, named), None)


def _offers(one: PodVersions | None) -> frozenset[Scheme]:
    return (one or PodVersions()).offers
