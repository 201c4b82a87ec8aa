# SPDX-License-Identifier: Apache-2.0
"""Which pods can do the work: those whose model fits it, and that compute nothing else.

What is done about other work, another round of ours or somebody else's, says ``spec.concurrencyPolicy``.
"""

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.work import ConcurrencyPolicy, ProtocolSpec, WorkSpec
from poc_operator.observed import PodReport, PodView
from poc_operator.planning.queue import may_take, other_round
from poc_operator.planning.snapshot import Snapshot, Work
from vllm_poc.wire.answers import ModelLimits, PowState

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
    findings = (check(spec, report.status.model) for check in _CHECKS)
    return next((finding for finding in findings if finding), _refused(report))


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
    """Pods that are ready, answer, and can do the work."""
    spec = snapshot.work.spec
    return [pod for pod, report in snapshot.answering if incompatibility(spec, report) is None]
