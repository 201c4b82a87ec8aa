# SPDX-License-Identifier: Apache-2.0
"""What ``GET status`` says about a round."""

from time import monotonic

from vllm_poc.server.generation import Round
from vllm_poc.server.payloads import round_config
from vllm_poc.wire.base import PowState, Protocol
from vllm_poc.wire.responses import ModelLimits, PowStatus, RoundStats, StatusResponse


def idle_status(session_id: str, model: ModelLimits) -> StatusResponse:
    """Return the status before the first round."""
    return StatusResponse(status=PowState.IDLE, state=PowState.IDLE, session_id=session_id, model=model)


def round_status(session_id: str, model: ModelLimits, current: Round, *, lists: bool) -> StatusResponse:
    """Return the status while a round runs and after it, until the next start."""
    request, counters, delivered = current.request, current.counters, current.delivered
    newest = counters.newest_valid if lists and request.protocol is Protocol.DISTANCE else ()
    return StatusResponse(
        status=PowState.IDLE if current.state is PowState.STOPPED else current.state,
        state=current.state,
        config=round_config(request),
        stats=RoundStats(total_processed=counters.checked, nonces_per_second=counters.rate_per_second),
        valid_nonces=[nonce for nonce, _ in newest],
        valid_distances=[float(value) for _, value in newest],
        total_checked=counters.checked,
        total_valid=counters.valid,
        elapsed_seconds=counters.elapsed_seconds,
        rate_per_second=counters.rate_per_second,
        r_target=request.r_target,
        session_id=session_id,
        round_id=request.round_id,
        next_index=counters.next_index,
        delivered_index=delivered.index,
        start_index=request.start_index,
        delivered_valid=delivered.valid,
        delivered_rejected=delivered.rejected,
        rejected=counters.not_finite + delivered.refused,
        last_progress_seconds=_age(counters.progressed),
        held_back_seconds=current.held_back_seconds,
        error=current.error,
        delivery_error=current.delivery_error,
        model=model,
    )


def pow_status(session_id: str, current: Round | None, state: PowState) -> PowStatus:
    """Return the short status that answers a command."""
    if current is None:
        return PowStatus(status=state, session_id=session_id)
    return PowStatus(
        status=state,
        session_id=session_id,
        round_id=current.request.round_id,
        next_index=current.counters.next_index,
        delivered_index=current.delivered.index,
    )


def _age(moment: float | None) -> float | None:
    return monotonic() - moment if moment is not None else None
