# SPDX-License-Identifier: Apache-2.0
"""Which pods can do the work: those whose model fits it, that are ready, and that compute nothing else.

What is done about other work, another round of ours or somebody else's, says ``spec.concurrencyPolicy``.

A pod that loads its model is no pod that does not answer: its server has yet to begin. How long it may load says its
own startup probe, or ``spec.podStartupSeconds`` where it has none.
"""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from poc_operator.apis.v1alpha1.fleet_upkeep import FleetPod
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import MAX_UNFIT
from poc_operator.apis.v1alpha1.work import ConcurrencyPolicy, ProtocolSpec, WorkSpec
from poc_operator.observed import Container, PodReport, PodView
from poc_operator.planning.queue import may_take, other_round
from poc_operator.planning.snapshot import Snapshot, Work
from vllm_poc.wire.answers import ModelLimits, PowState
from vllm_poc.wire.messages import Protocol, Scheme

Finding = tuple[Reason, str]


def _wrong_model(spec: WorkSpec, model: ModelLimits) -> Finding | None:
    if not model.names or spec.model.name in model.names:
        return None
    served = ", ".join(f'"{name}"' for name in model.names)
    return Reason.MODEL_MISMATCH, (
        f'spec.model.name is "{spec.model.name}" but the pod serves {served}: '
        "create a new one with the served name, or select pods that serve this model"
    )


def _sequence_too_long(spec: WorkSpec, model: ModelLimits) -> Finding | None:
    if not model.max_seq_len or spec.model.seq_len <= model.max_seq_len:
        return None
    return Reason.SEQUENCE_TOO_LONG, (
        f"spec.model.seqLen is {spec.model.seq_len} but the pod allows {model.max_seq_len}: "
        "create a new one with a smaller seqLen, or start vLLM with a larger --max-model-len"
    )


def _k_dim_too_large(spec: WorkSpec, model: ModelLimits) -> Finding | None:
    artifact = spec.artifact if isinstance(spec, ProtocolSpec) else None
    if artifact is None or not model.hidden_size or artifact.k_dim <= model.hidden_size:
        return None
    return Reason.K_DIM_TOO_LARGE, (
        f"spec.artifact.kDim is {artifact.k_dim} but the model's hidden size is {model.hidden_size}: "
        "create a new one with a smaller kDim"
    )


def _scheme_not_offered(spec: WorkSpec, report: PodReport) -> Finding | None:
    """Return why the pod takes no part in work of the decode scheme: it is told none on trial."""
    if not isinstance(spec, ProtocolSpec) or spec.protocol is not Protocol.DECODE:
        return None
    if report.status is not None and report.status.model.rebuilt_codebook:
        return Reason.SCHEME_NOT_OFFERED, (
            "spec.decode needs the network's codebook, and the pod computes chains with one that it has made itself: "
            "set VLLM_POC_DECODE_CODEBOOK for it to the network's file, and take VLLM_POC_DECODE_REBUILD_CODEBOOK away"
        )
    if report.schemes is None:
        return Reason.SCHEME_NOT_OFFERED, (
            "spec.decode needs pods that offer the decode scheme, and the pod does not tell its schemes by GET "
            "versions: update its image"
        )
    if Scheme.DECODE in report.schemes:
        return None
    return Reason.SCHEME_NOT_OFFERED, (
        "spec.decode needs pods that offer the decode scheme, and the pod offers the prefill scheme alone: set "
        "spec.decode of its fleet (other pods: VLLM_POC_DECODE_CODEBOOK and VLLM_POC_DECODE_RESERVE_BYTES), take pods "
        "of the network's plugin 0.2 or later, or create a new one with artifact"
    )


_CHECKS = (_wrong_model, _sequence_too_long, _k_dim_too_large)
_REFUSALS = {reason.value: reason for reason in Reason}


def _refused(report: PodReport) -> Finding | None:
    if report.refusal is None:
        return None
    reason, message = report.refusal
    return _REFUSALS.get(reason, Reason.REQUEST_REFUSED), f"the pod refused to start: {message}"


def incompatibility(spec: WorkSpec, report: PodReport) -> Finding | None:
    """Return why the pod cannot do the work and what to do about it; None if it can."""
    if report.status is None:
        return None
    return _lack(spec, report, report.status.model) or _refused(report)


def _lack(spec: WorkSpec, report: PodReport, model: ModelLimits) -> Finding | None:
    findings = (check(spec, model) for check in _CHECKS)
    return next((finding for finding in findings if finding), None) or _scheme_not_offered(spec, report)


def unfit_revisions(snapshot: Snapshot[Work]) -> list[str]:
    """Return the revisions of StatefulSets of which no pod that answers can do the work, whatever happens to it.

    One that was told is told on while none of its pods answers.
    """
    fits: dict[str, bool] = {}
    for pod, report in snapshot.answering:
        if pod.revision and not fits.get(pod.revision):
            fits[pod.revision] = not _never_fits(snapshot.work.spec, report)
    for revision in {pod.revision for pod in snapshot.live_pods} & set(snapshot.work.status.unfit_revisions):
        fits.setdefault(revision, False)
    return sorted(revision for revision, able in fits.items() if not able)[:MAX_UNFIT]


def _never_fits(spec: WorkSpec, report: PodReport) -> bool:
    """Whether only another template lets the pod do the work. A refusal may pass, as that of a paused server."""
    found = _lack(spec, report, report.status.model) if report.status is not None else None
    if found is not None:
        return found[0] is not Reason.SCHEME_NOT_OFFERED or report.schemes is not None
    return report.refusal is not None and report.refusal[0] == Reason.MODEL_UNSUPPORTED


def computes_other_work(snapshot: Snapshot[Work], report: PodReport) -> bool:
    """Whether the pod generates for another round than this one."""
    status = report.status
    return status is not None and status.state is PowState.GENERATING and status.round_id != snapshot.work.id


def busy_pods(snapshot: Snapshot[Work]) -> list[PodView]:
    """Return the ready pods that compute other work."""
    return [pod for pod, report in snapshot.answering if computes_other_work(snapshot, report)]


def holder(snapshot: Snapshot[Work], report: PodReport) -> str:
    """Say what the pod computes: a round of the namespace by its name, other work as far as the pod says."""
    status = report.status
    if status is None:
        return "no answer"
    other = other_round(snapshot, report)
    height = f", height {status.config.block_height}" if status.config else ""
    return f"round {other.name if other is not None else status.round_id or 'without id'}{height}"


def busy_with(snapshot: Snapshot[Work], report: PodReport) -> str:
    """Say what a pod computes that other work keeps busy, and why this work does not replace it though it may."""
    spared = ", and has refused this work lately" if report.spared and may_replace(snapshot, report) else ""
    return f"{holder(snapshot, report)}{spared}"


def may_replace(snapshot: Snapshot[Work], report: PodReport) -> bool:
    """Whether this work may stop what the pod computes: only what stands behind it in the queue of `planning.queue`."""
    work, status = snapshot.work, report.status
    if not isinstance(work, PoCRound) or work.spec.concurrency_policy is not ConcurrencyPolicy.REPLACE:
        return False
    other = other_round(snapshot, report)
    if other is not None:
        return may_take(snapshot, other)
    if status is None:
        return False
    if status.config is None:
        return work.spec.priority >= 0
    return (work.spec.priority, work.spec.block_height) > (0, status.config.block_height)


def usable_pods(snapshot: Snapshot[Work]) -> list[PodView]:
    """Pods that are ready, answer, can do the work, and are not barred by their fleet."""
    spec = snapshot.work.spec
    return [pod for pod, report in snapshot.answering if not pod.barred and incompatibility(spec, report) is None]


def takeable_pods(snapshot: Snapshot[Work]) -> list[PodView]:
    """Usable pods, busy or not, without those whose work was stopped before for a start that they refused."""
    reports = snapshot.reports
    return [pod for pod in usable_pods(snapshot) if not _is_spared(snapshot, reports[pod.uid])]


def spares_others(snapshot: Snapshot[Work]) -> bool:
    """Whether a pod computes other work that is not stopped, for the pod has refused this one lately."""
    return any(_is_spared(snapshot, report) for _, report in snapshot.answering)


def _is_spared(snapshot: Snapshot[Work], report: PodReport) -> bool:
    return report.spared and computes_other_work(snapshot, report)


#: So many pods are named in a message; more would not be read.
NAMED_PODS = 3


PodT = TypeVar("PodT", PodView, FleetPod)


def named(pods: Sequence[PodT], detail: Callable[[PodT], str]) -> str:
    """Name the first pods, each with a detail."""
    texts = ", ".join(f"{pod.name} ({detail(pod)})" for pod in pods[:NAMED_PODS])
    return texts if len(pods) <= NAMED_PODS else f"{texts} and {len(pods) - NAMED_PODS} more"


#: Characters that are told of a message of the kubelet: three pods with such messages fit into a condition's.
_MESSAGE = 120
#: An address: up to the quote that ends it, or to white space. Punctuation at its end is the sentence's.
_ADDRESS = re.compile(
    r"""(?<=")([a-z][a-z0-9+.-]*://)((?:\\.|[^"\\])*)()|([a-z][a-z0-9+.-]*://)([^\s"]*?)([:,.;]*(?=[\s"]|$))""", re.I
)
#: What proves who somebody is, where a message quotes a request.
_CREDENTIALS = re.compile(
    r"""\b(?:(Authorization["':=\s]+\w+)["'\s]+[^\s",]+|(Basic|Bearer)["'\s]+(?=[^\s",]*[\d=])[^\s",]{16,})"""
)
_CRASHES = "CrashLoopBackOff"


def why_waiting(pod: PodView) -> str:
    """Say why a pod is not ready, in the kubelet's words, and in those of the registry that it gets no image from.

    What is told of crashes is how long the next start waits, and changes with each.
    """
    told = "" if pod.waiting_for == _CRASHES else _shortened(pod.waiting_message)
    return f"{pod.waiting_for}: {told}" if told else pod.waiting_for


def _shortened(message: str) -> str:
    """Return the end of a message in one line: what was being done is told first, and the cause last."""
    line = _CREDENTIALS.sub(r"\1\2 …", _ADDRESS.sub(_public, " ".join(message.split())))
    kept, *before = reversed("".join(filter(str.isprintable, line)).split(": "))
    for part in before:
        if len(part) + len(kept) + 2 > _MESSAGE:
            break
        kept = f"{part}: {kept}"
    return kept if len(kept) <= _MESSAGE else f"{kept[: _MESSAGE - 1]}…"


def _public(address: re.Match[str]) -> str:
    """Return server and path of an address: users, passwords, tokens and signatures stand in the rest.

    What may be either goes. The digest of an image stays.
    """
    quoted, bare = address.group(1, 2, 3), address.group(4, 5, 6)
    scheme, rest, end = bare if quoted[0] is None else quoted
    path = re.split("[?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(path) :]:
        return f"{scheme}…{end}"
    server, digest, of = path.partition("@sha256:")
    return f"{scheme}{server.rpartition('@')[2]}{digest}{of}{end}"


def loads_until(snapshot: Snapshot[Work], pod: PodView) -> datetime | None:
    """Return until when the pod may load its model; None if it does not load, or has had its time."""
    spec = snapshot.work.spec
    until = pod.loads_until(spec.port, spec.pod_startup_seconds)
    return until if until is not None and until > snapshot.now else None


def loads(snapshot: Snapshot[Work], pod: PodView | None) -> bool:
    """Whether the pod loads its model, and has not had its time."""
    return pod is not None and loads_until(snapshot, pod) is not None


def loading_seconds(snapshot: Snapshot[Work], since: datetime) -> float:
    """Return the longest time that a pod may take to load which loads now, or has loaded since; 0 without one."""
    spec = snapshot.work.spec
    servers = [(pod, pod.container(spec.port)) for pod in snapshot.live_pods]
    seconds = [
        spec.pod_startup_seconds if server.startup_seconds is None else server.startup_seconds
        for pod, server in servers
        if loads(snapshot, pod) or _began_since(since, pod, server)
    ]
    return max(seconds, default=0.0)


def _began_since(since: datetime, pod: PodView, server: Container) -> bool:
    """Whether the pod's server runs, and was started or became ready since."""
    if server.running_since is None:
        return False
    return server.running_since >= since or (pod.ready_since is not None and pod.ready_since >= since)


def why_not_ready(snapshot: Snapshot[Work], pod: PodView) -> str:
    """Say what a pod that is not ready waits for."""
    until = loads_until(snapshot, pod)
    if until is None:
        return why_waiting(pod) or "not ready"
    server = pod.container(snapshot.work.spec.port)
    left = (until - snapshot.now).total_seconds()
    so_far = snapshot.seconds_since(server.running_since)
    return f"loading for {so_far:.0f} s of at most {so_far + left:.0f} s"


def why_unusable(snapshot: Snapshot[Work], pod: PodView) -> str | None:
    """Say why a live pod cannot work on the object now; None if it can."""
    if not pod.ready:
        return why_not_ready(snapshot, pod)
    if pod.barred:
        return pod.barred
    report = snapshot.reports.get(pod.uid)
    if report is None or report.status is None:
        return (report.error if report is not None else None) or "not polled yet"
    finding = incompatibility(snapshot.work.spec, report)
    if finding is not None:
        return finding[1]
    return f"computes {busy_with(snapshot, report)}" if computes_other_work(snapshot, report) else None


def unusable_pods(snapshot: Snapshot[Work], *, beside: frozenset[str | None]) -> str:
    """Name the live pods that cannot work now, and why; ``beside`` are the uids of those that work. Empty if none."""
    found = {
        pod.uid: why for pod in snapshot.live_pods if pod.uid not in beside and (why := why_unusable(snapshot, pod))
    }
    return named([pod for pod in snapshot.live_pods if pod.uid in found], lambda pod: found[pod.uid])
