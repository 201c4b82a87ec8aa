# SPDX-License-Identifier: Apache-2.0
"""Whether a pod can run the round at all, judged by what the pod says about its model."""

from poc_operator.model.conditions import Reason
from poc_operator.model.pods import PodReport
from poc_operator.model.spec import RoundSpec
from vllm_poc.wire.messages import ModelLimits

Finding = tuple[Reason, str]


def _wrong_model(spec: RoundSpec, model: ModelLimits) -> Finding | None:
    if not model.names or spec.model.name in model.names:
        return None
    served = ", ".join(f'"{name}"' for name in model.names)
    return Reason.MODEL_MISMATCH, (
        f'spec.model.name is "{spec.model.name}" but the pod serves {served}: '
        "create the round with the served name, or select pods that serve this model"
    )


def _sequence_too_long(spec: RoundSpec, model: ModelLimits) -> Finding | None:
    if not model.max_seq_len or spec.model.seq_len <= model.max_seq_len:
        return None
    return Reason.SEQUENCE_TOO_LONG, (
        f"spec.model.seqLen is {spec.model.seq_len} but the pod allows {model.max_seq_len}: "
        "create the round with a smaller seqLen, or start vLLM with a larger --max-model-len"
    )


def _k_dim_too_large(spec: RoundSpec, model: ModelLimits) -> Finding | None:
    if spec.artifact is None or not model.hidden_size or spec.artifact.k_dim <= model.hidden_size:
        return None
    return Reason.K_DIM_TOO_LARGE, (
        f"spec.artifact.kDim is {spec.artifact.k_dim} but the model's hidden size is {model.hidden_size}: "
        "create the round with a smaller kDim"
    )


_CHECKS = (_wrong_model, _sequence_too_long, _k_dim_too_large)

_REFUSALS = {reason.value: reason for reason in Reason}


def _refused(report: PodReport) -> Finding | None:
    if report.refusal is None:
        return None
    reason, message = report.refusal
    return _REFUSALS.get(reason, Reason.REQUEST_REFUSED), f"the pod refused to start: {message}"


def incompatibility(spec: RoundSpec, report: PodReport) -> Finding | None:
    """Return why the pod cannot run the round and what to do about it; None if it can."""
    if report.status is None:
        return None
    findings = (check(spec, report.status.model) for check in _CHECKS)
    return next((finding for finding in findings if finding), _refused(report))
