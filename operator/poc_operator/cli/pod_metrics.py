# SPDX-License-Identifier: Apache-2.0
"""What pods tell of chat and of their pace in their metrics, read through the API server's proxy.

Chat goes before PoC, so that a round may be slow or stand still and nothing is wrong. Only the pods know. The operator
writes counters at most every 15 s, so that the pace of the last seconds is the pods' to tell, too.
"""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.cli.cluster import Cluster, UserError, core

#: Pods that are asked at most, and how many at once.
MOST_PODS = 128
_AT_ONCE = 16
_HELD_NOW = re.compile(r'^poc_activity\{[^}]*activity="HeldByChat"[^}]*\} 1(?:\.0)?$', re.MULTILINE)
_HELD_SECONDS = re.compile(r"^poc_held_back_seconds_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

_COMPUTED = re.compile(r'^poc_nonces_computed_total\{[^}]*work="round"[^}]*\} (\S+)$', re.MULTILINE)

#: Namespace and name of a pod.
PodKey = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Whether chat holds a pod's PoC back now, and for how many seconds it has since the server started.

    ``computed`` are the nonces that the server has computed for rounds. ``error`` says why the pod could not be asked.
    """

    held: bool = False
    seconds: float = 0.0
    computed: float = 0.0
    error: str = ""


def parse_chat(text: str) -> Chat:
    """Return what an exposition of metrics tells; an error if the server has no PoC."""
    found = _HELD_SECONDS.findall(text)
    if not found:
        return Chat(error="its metrics have no poc_held_back_seconds_total")
    try:
        seconds = sum(map(float, found))
        computed = sum(map(float, _COMPUTED.findall(text)))
    except ValueError:
        return Chat(error="its metrics cannot be read")
    return Chat(held=_HELD_NOW.search(text) is not None, seconds=seconds, computed=computed)


def active_pods(rounds: Iterable[PoCRound]) -> Mapping[PodKey, int]:
    """Return the pods that compute for these rounds, each with the port of its server."""
    found = {
        (each.metadata.namespace, slot.pod): each.spec.port
        for each in rounds
        for slot in each.status.assignments
        if slot.state.active and slot.pod
    }
    return dict(list(found.items())[:MOST_PODS])


def read_chat(cluster: Cluster, pods: Mapping[PodKey, int]) -> Mapping[PodKey, Chat]:
    """Ask pods for their metrics, many at once."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        told = pool.map(lambda pod: _ask(cluster, pod[0], pod[1]), pods.items())
        return dict(zip(pods, told, strict=True))


def _ask(cluster: Cluster, pod: PodKey, port: int) -> Chat:
    namespace, name = pod
    try:
        return parse_chat(cluster.text(f"{core('pods', namespace)}/{name}:{port}/proxy/metrics").decode())
    except UserError as error:
        return Chat(error=str(error))


def held_share(before: Chat | None, now: Chat, seconds: float) -> float | None:
    """Return the share of the last seconds in which chat held the pod back; None if it is not known."""
    if before is None or before.error or now.error or seconds <= 0 or now.seconds < before.seconds:
        return None
    return min(1.0, (now.seconds - before.seconds) / seconds)


def pace(before: Chat | None, now: Chat, seconds: float) -> float | None:
    """Return the nonces per second that a pod has computed for rounds in the last seconds; None if it is not known."""
    if before is None or before.error or now.error or seconds <= 0 or now.computed < before.computed:
        return None
    return (now.computed - before.computed) / seconds
