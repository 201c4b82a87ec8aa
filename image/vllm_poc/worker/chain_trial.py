# SPDX-License-Identifier: Apache-2.0
"""The trial of the decode scheme: chains that are computed before any others, on all ranks together.

They show whether chat's caches stay as they are, whether fused operations give what vLLM's own give, and whether
captured steps give what others give. Chains then take the fastest way that passed. The claims of the trial are fixed,
so that all ways take the same steps, and only margins tell them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_poc.logs import get_logger
from vllm_poc.maths.decode import NO_POINT
from vllm_poc.rpc import DecodeRequest, DecodeResult, chain_nonces
from vllm_poc.wire.artifacts import CODEBOOK_POINTS
from vllm_poc.worker.model.scratch import UnsupportedModelError
from vllm_poc.worker.passes.plain import PlainPass

if TYPE_CHECKING:
    from vllm_poc.worker.decoding import Decoder

_log = get_logger(__name__)

ONE_BY_ONE = "the operations of decode steps are started one by one, which takes longer"
_NONCES, _TOKENS, _STEPS = 2, 3, 3
#: Mean difference of two passes' margins, in units of the dtype's epsilon. Rounding makes 0.3 of them (0.002 in
#: bfloat16), and states that have nothing to do with each other 9.
_EPSILONS = 2


def tried(decoder: Decoder) -> Decoder:
    """Compute the first chains, choose how others are computed, and return the decoder.

    UnsupportedModelError if chains change what chat's attention holds, or their reserve is too small. MemoryError, or
    PyTorch's, if a rank has no room for them.
    """
    nonces = min(_NONCES, decoder.facts["max_batch_nonces"])
    if chain_nonces(decoder.facts, _TOKENS + _STEPS) < nonces:
        raise UnsupportedModelError(
            f"The decode scheme has {decoder.facts['reserve_bytes']} bytes for keys and values, which is too little: "
            "set more aside."
        )
    chat = decoder.adapter.chat_memory
    before = chat.held()
    _choose(decoder, _request(nonces))
    changed = chat.changes(before, decoder.storages)
    if not decoder.adapter.ranks.agreed(not changed):
        named = changed[0] if changed else "on another rank"
        raise UnsupportedModelError(
            f"The decode scheme changes what chat's attention holds here ({named}): restart "
            "vLLM with another --attention-backend."
        )
    return decoder


def _request(nonces: int) -> DecodeRequest:
    claims = [[(3 * step + nonce) % CODEBOOK_POINTS for step in range(_STEPS + 1)] for nonce in range(nonces)]
    return DecodeRequest(
        block_hash="",
        public_key="",
        nonces=list(range(nonces)),
        seq_len=_TOKENS,
        max_tokens=_STEPS,
        forced=claims,
        parts=nonces + _STEPS,
        cuts={"prefill": 1, "step": 1, "graph": 1},
    )


def _choose(decoder: Decoder, request: DecodeRequest) -> None:
    with decoder.uncaptured():
        found = _whole(decoder, request)
        if not isinstance(decoder.pass_, PlainPass):
            found = _compared(decoder, request, found)
    if decoder.captures:
        captured = _whole(decoder, request)
        if not decoder.adapter.ranks.agreed(_values(captured) == _values(found)):
            decoder.start_steps_one_by_one()
            decoder.findings.append(f"Captured decode steps give other indices than others: {ONE_BY_ONE}.")
    decoder.forget()


def _whole(decoder: Decoder, request: DecodeRequest) -> DecodeResult | None:
    """Compute the chains to their end."""
    while True:
        found = decoder.run(request)
        if not decoder.begun:
            return found


def _compared(decoder: Decoder, request: DecodeRequest, found: DecodeResult | None) -> DecodeResult | None:
    """Compute the chains by vLLM's own operations, and go on with these if the fused ones gave something else.

    Returns what the way that is taken gives.
    """
    fused, steps = decoder.pass_, f"{len(request['nonces'])} chains of {_STEPS} steps"
    decoder.use(PlainPass(decoder.adapter))
    try:
        expected = _whole(decoder, request)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:
        _log.exception("chains cannot be computed by vLLM's own operations")
        decoder.use(fused)
        decoder.findings.append(
            f"Chains are computed with fused operations, which nothing was compared with: vLLM's own fail in {steps}, "
            "and the worker's log says how."
        )
        return found
    tolerance = margin_tolerance(decoder.adapter.dtype, quantised=decoder.adapter.is_quantised)
    if not decoder.adapter.ranks.agreed(are_close(found, expected, tolerance)):
        decoder.findings.append(
            f"Chains are computed with vLLM's own operations, and slower, since in {steps} fused ones are further from "
            "these than rounding makes them."
        )
        return expected
    decoder.use(fused)
    decoder.findings.append(f"Chains are computed with fused operations: in {steps} they gave what vLLM's own gave.")
    return found


def margin_tolerance(dtype: torch.dtype, *, quantised: bool) -> float:
    """Return by how much margins may differ on average between passes that compute the same in this dtype."""
    # Matrix products on a GPU round to no less than these, whatever the dtype.
    epsilon = max(torch.finfo(dtype).eps, torch.finfo(torch.bfloat16 if quantised else torch.float16).eps)
    return float(_EPSILONS * epsilon)


def are_close(found: DecodeResult | None, expected: DecodeResult | None, tolerance: float) -> bool:
    """Whether two passes gave the same chains, as far as rounding allows; on a rank without results they did."""
    if found is None or expected is None:
        return True
    lost = [torch.tensor(result["indices"]) == NO_POINT for result in (found, expected)]
    apart = (torch.tensor(found["margins"]) - torch.tensor(expected["margins"])).abs().mean()
    return bool((lost[0] == lost[1]).all()) and float(apart) <= tolerance


def _values(result: DecodeResult | None) -> object:
    return result and (result["indices"], result["margins"])
