# SPDX-License-Identifier: Apache-2.0
"""What ``GET status`` and the gauges of ``/metrics`` say."""

from time import monotonic

from vllm_poc.rpc import ModelFacts
from vllm_poc.server import metrics
from vllm_poc.server.callbacks.outbox import Outbox
from vllm_poc.server.callbacks.payloads import round_config
from vllm_poc.server.description import ModelDescription
from vllm_poc.server.generation import Generation
from vllm_poc.server.jobs import JobQueue
from vllm_poc.server.phases import Phases
from vllm_poc.server.scheduler import Scheduler, distance_of
from vllm_poc.wire.answers import ModelLimits, PowState, RoundStats, StatusResponse
from vllm_poc.wire.messages import Protocol

#: Status waits no longer for the model's description, which takes seconds the first time.
_GLANCE_SECONDS = 0.2


def status_response(
    session_id: str, model: ModelLimits, phases: Phases, outbox: Outbox, *, lists: bool, paused_by: str | None
) -> StatusResponse:
    """Return the status: the phase, the round as configured, and what its newest generation counted."""
    fields = {
        "status": PowState.IDLE if phases.state is PowState.STOPPED else phases.state,
        "state": phases.state,
        "session_id": session_id,
        "model": model,
        "leases": True,
        "activity": phases.activity,
        "paused_by": paused_by,
        "callbacks_pending": outbox.pending,
        "callbacks_lost": outbox.lost,
    }
    config = phases.config
    if config is not None:
        fields |= {"config": round_config(config), "r_target": config.r_target}
        fields |= {"round_id": config.round_id, "owner": config.owner}
    if phases.generation is not None:
        fields |= _round_fields(phases.generation, lists=lists)
    if phases.lease is not None:
        fields |= {"lease_seconds": phases.lease.seconds, "lease_remaining_seconds": phases.lease.remaining}
    return StatusResponse.model_validate(fields)


def _round_fields(current: Generation, *, lists: bool) -> dict[str, object]:
    request, counters, delivered = current.request, current.counters, current.delivery.delivered
    newest = counters.newest_valid if lists and request.protocol is Protocol.DISTANCE else ()
    return {
        "stats": RoundStats(total_processed=counters.checked, nonces_per_second=counters.rate_per_second),
        "valid_nonces": [nonce for nonce, _ in newest],
        "valid_distances": [distance_of(value) for _, value in newest],
        "total_checked": counters.checked,
        "total_valid": counters.valid,
        "elapsed_seconds": counters.elapsed_seconds,
        "rate_per_second": counters.rate_per_second,
        "next_index": counters.next_index,
        "delivered_index": delivered.index,
        "start_index": request.start_index,
        "end_index": current.end_index,
        "delivered_valid": delivered.valid,
        "delivered_rejected": delivered.rejected,
        "rejected": counters.not_finite + delivered.refused,
        "last_progress_seconds": monotonic() - counters.progressed if counters.progressed is not None else None,
        "held_back_seconds": current.held_back_seconds,
        "error": current.error,
        "stop_reason": current.ending.reason if current.ending is not None else None,
        "stop_message": current.ending.message if current.ending is not None else None,
        "delivery_error": current.delivery.error,
        "callback_unauthorized": current.delivery.unauthorized,
    }


async def known_facts(model: ModelDescription, *, paused_by: str | None) -> ModelFacts | None:
    """Return what the engine says of the model; None if it does not say so now."""
    if model.known is not None or paused_by is not None:
        return model.known
    return await model.glance(_GLANCE_SECONDS)


async def model_limits(
    served_names: frozenset[str], model: ModelDescription, *, paused_by: str | None, shortage: str | None
) -> ModelLimits:
    """Return what the served model allows; all 0 and why, as long as that is not known.

    ``shortage`` says what found no room in the device's memory.
    """
    names, facts = sorted(served_names), await known_facts(model, paused_by=paused_by)
    if facts is None:
        return ModelLimits(names=names, error=paused_by or model.error)
    return ModelLimits(
        names=names,
        max_seq_len=facts["max_model_len"],
        hidden_size=facts["hidden_size"],
        scratch_bytes=facts["scratch_bytes"],
        fused=facts["fused"],
        attention=", ".join(facts["attention"]),
        experts=", ".join(facts["experts"]),
        dtype=facts["dtype"],
        kv_cache_dtype=facts["kv_cache_dtype"],
        quantization=facts["quantization"],
        flags=facts["flags"],
        max_batch_tokens=facts["max_batch_tokens"],
        max_batch_nonces=facts["max_batch_nonces"],
        findings=model.findings,
        rebuilt_codebook="decode" in facts and facts["decode"]["rebuilt"],
        error=facts["refusal"] or shortage,
    )


def readiness(scheduler: Scheduler) -> metrics.Readiness:
    """Return whether the engine computes for PoC, or why not."""
    facts = scheduler.model.known
    if scheduler.gate.is_closed:
        return "Ending"
    if scheduler.gate.pauses.reason is not None:
        return "Paused"
    if facts is None and scheduler.model.error is not None:
        return "NoMemory" if scheduler.model.lacks_memory else "EngineFailed"
    if facts is None:
        return "Starting"
    if facts["refusal"] is not None:
        return "ModelUnsupported"
    return "Ready" if scheduler.shortage.error is None else "NoMemory"


def set_gauges(scheduler: Scheduler, phases: Phases, jobs: JobQueue) -> None:
    """Bring the gauges up to date that no event sets."""
    facts = scheduler.model.known
    metrics.set_ready(readiness(scheduler))
    metrics.FUSED.labels().set(facts is not None and facts["fused"])
    metrics.set_state(phases.state, phases.activity)
    metrics.PENDING.labels().set(phases.pending)
    queued, nonces = jobs.load
    metrics.QUEUED_JOBS.labels().set(queued)
    metrics.QUEUED_NONCES.labels().set(nonces)
