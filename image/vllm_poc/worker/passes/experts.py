# SPDX-License-Identifier: Apache-2.0
"""vLLM's Marlin experts with MXFP4 weights, by products that unpack the weights once for all tokens of a batch.

All batches go this way, so that a nonce is the same alone and among others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_poc.kernels.packed_experts import (
    AT_ONCE,
    COLUMNS,
    GROUP,
    ROWS,
    TILE_K,
    TILE_N,
    ExpertRows,
    PackedLayout,
    multiply,
    multiply_weighted,
    unpack,
)
from vllm_poc.worker.passes.plain import Patch

if TYPE_CHECKING:
    from vllm_poc.worker.model.adapter import ModelAdapter

log = logging.getLogger(__name__)

_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.marlin_moe"
_PREPARATION = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4"
#: Generations of cards with descriptors of tiles, and with room enough for those of a product.
_GENERATIONS = {9, 10}
#: Most bytes of weights that are unpacked at a time.
_UNPACKED = 2 * 2**30
#: How many times as large as packed ones unpacked weights are.
_TIMES = 4
#: What experts call their weights.
_MATRICES = ("w13_weight", "w2_weight")
#: Arguments of vLLM's function that are None, or else its own way is taken.
_ABSENT = {"bias1", "bias2", "global_scale1", "global_scale2", "input_global_scale1", "input_global_scale2"}
_ABSENT |= {"w1_zeros", "w2_zeros", "expert_map", "input_dtype"}
#: Others that it is told, all of which are known here.
_KNOWN = {"hidden_states", "w1", "w2", "w1_scale", "w2_scale", "topk_weights", "topk_ids", "quant_type_id", "output"}
_KNOWN |= {"activation", "activation_func", "activation_config", "moe_sum", "global_num_experts"}
_KNOWN |= {"intermediate_cache13", "intermediate_cache2", "apply_router_weight_on_input"}
#: Those that must be there.
_GIVEN = {"activation_func", "moe_sum", "output", "intermediate_cache13"}
#: A small matrix, by which the places of numbers are found.
_N, _K = 128, 128
_NIBBLES, _WORD = 3, 8
#: Exponents of two that stand for the columns of a tile.
_LEAST_POWER = 64
#: vLLM's Triton experts, and the rows of a tile of theirs where each expert has few: vLLM has 64 from 65 tokens on.
_TRITON = "vllm.model_executor.layers.fused_moe.fused_moe"
_FEW_ROWS = 16
_ARRANGE = "prepare_moe_mxfp4_layer_for_marlin"
_SLOWER = "PoC uses vLLM's own products for them, which are slower"


def expert_layout(adapter: ModelAdapter) -> PackedLayout | None:
    """Return where vLLM puts weights; None if the model has no such experts, or vLLM stores them in another way."""
    generation, _ = torch.cuda.get_device_capability()
    if "MarlinExperts" not in adapter.expert_kernels or generation not in _GENERATIONS:
        return None
    arrange = getattr(sys.modules.get(_PREPARATION), _ARRANGE, None)
    if arrange is None:  # the experts have other weights
        return None
    try:
        layout = _found_layout(arrange, adapter.device)
    except Exception:
        log.exception("it cannot be found out how this release of vLLM packs MXFP4 experts: %s", _SLOWER)
        return None
    if layout is None:
        log.warning("this release of vLLM packs MXFP4 experts in an unknown way: %s", _SLOWER)
    return layout


def unpacked_bytes(adapter: ModelAdapter) -> int:
    """Return how much memory the weights take that are unpacked at a time, whatever the size of a batch."""
    matrices = (getattr(module, name, None) for module in adapter.model.modules() for name in _MATRICES)
    packed = (matrix.numel() * matrix.element_size() for matrix in matrices if matrix is not None)
    return max((min(_UNPACKED, _TIMES * size) for size in packed), default=0)


def expert_patches(layout: PackedLayout | None) -> Iterator[Patch]:
    """Replace vLLM's function where its experts look it up."""
    module = sys.modules.get(_EXPERTS)
    original = getattr(module, "fused_marlin_moe", None)
    if layout is not None and original is not None:
        yield Patch(module, "fused_marlin_moe", partial(_experts, original, layout))


def tile_patches() -> Iterator[Patch]:
    """Let vLLM's Triton experts multiply few rows of each expert in small tiles, where it has no tuned sizes.

    That is so in decode steps: weights are read at the rate of the memory then, if nothing else takes longer.
    """
    module = sys.modules.get(_TRITON)
    original = getattr(module, "get_default_config", None)
    if original is not None:
        yield Patch(module, "get_default_config", partial(_tile, original))


def _tile(original: Callable[..., dict[str, int]], *call: Any, **options: Any) -> dict[str, int]:  # noqa: ANN401
    config = original(*call, **options)
    try:
        tokens, experts, top_k = call[0], call[1], call[4]
        few = tokens * top_k <= _FEW_ROWS * experts
    except (IndexError, TypeError):  # another release's arguments
        return config
    return config | {"BLOCK_SIZE_M": min(_FEW_ROWS, config["BLOCK_SIZE_M"])} if few else config


def _found_layout(arrange: Callable[..., Any], device: torch.device) -> PackedLayout | None:
    """Let vLLM arrange weights whose numbers are their own places; None if unpacking others does not give them back."""
    n, k = torch.arange(_N, device=device)[:, None], torch.arange(_K, device=device)
    numbers = (n % TILE_N * TILE_K + k % TILE_K).int()
    places = torch.zeros(TILE_N * TILE_K, dtype=torch.int32, device=device)
    powers = (_LEAST_POWER + n % TILE_N).expand(_N, _K // GROUP).to(torch.uint8)
    for part in range(_NIBBLES):
        words, scales = _arranged(arrange, numbers >> (4 * part) & 15, powers)
        places |= _nibbles(words[0, 0, : TILE_N * TILE_K // _WORD]) << (4 * part)
    stored = scales[0, 0, :TILE_N].int() - _LEAST_POWER
    everything = torch.arange(TILE_N * TILE_K, dtype=torch.int32, device=device)
    if not torch.equal(places.sort().values, everything) or not torch.equal(stored.sort().values, everything[:TILE_N]):
        return None
    layout = PackedLayout(places.argsort().int().view(TILE_N, TILE_K), stored.argsort().int())
    words_of = layout.places.view(-1, 2) // _WORD
    return layout if torch.equal(words_of[:, 0], words_of[:, 1]) and _gives_back(arrange, layout) else None


def _gives_back(arrange: Callable[..., Any], layout: PackedLayout) -> bool:
    device = layout.places.device
    generator = torch.Generator(device).manual_seed(1)
    numbers = torch.randint(0, 16, (_N, _K), generator=generator, device=device, dtype=torch.int32)
    powers = torch.randint(100, 140, (_N, _K // GROUP), generator=generator, device=device, dtype=torch.uint8)
    words, scales = _arranged(arrange, numbers, powers)
    found = torch.empty(1, _N, _K, dtype=torch.bfloat16, device=device)
    unpack(words, scales, layout, found)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    values = torch.cat([sizes, -sizes])[numbers.long()]
    expected = values * torch.exp2(powers.float() - 127).repeat_interleave(GROUP, dim=1)
    return bool(torch.equal(found[0].float(), expected))


def _arranged(arrange: Callable[..., Any], numbers: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
    """Return one expert's words ``[1, k / 16, 2 n]`` and scales ``[1, k / 32, n]`` as vLLM stores them.

    ``numbers`` of 4 bits ``[n, k]`` and exponents ``[n, k / 32]`` are a checkpoint's.
    """
    packed = (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8)[None]
    layer = SimpleNamespace(params_dtype=torch.bfloat16)
    # The second matrix of an expert has as many columns as the first has rows for each half.
    second = torch.zeros(1, _K, _N // 4, dtype=torch.uint8, device=packed.device)
    second_powers = torch.zeros(1, _K, _N // 2 // GROUP, dtype=torch.uint8, device=packed.device)
    words, _, scales, *_ = arrange(layer, packed, second, powers[None].contiguous(), second_powers, None, None)
    return words, scales.view(torch.uint8)


def _nibbles(words: Tensor) -> Tensor:
    shifts = 4 * torch.arange(_WORD, dtype=torch.int32, device=words.device)
    return (words[:, None] >> shifts & 15).flatten()


def _experts(original: Callable[..., Tensor], layout: PackedLayout, *others: object, **call: Any) -> Tensor:  # noqa: ANN401
    if others or not _covers(call):
        _tell_of_others()
        return original(*others, **call)
    x, w1, w2, output = call["hidden_states"], call["w1"], call["w2"], call["output"]
    topk_ids, top_k, experts = call["topk_ids"], call["topk_ids"].shape[1], len(call["w1"])
    align = sys.modules[_EXPERTS].moe_align_block_size
    rows = ExpertRows(*align(topk_ids, ROWS, experts, None, ignore_invalid_experts=True))
    hidden, inner = x.shape[1], w2.shape[1] * TILE_K
    made = torch.empty(len(rows.slots), 2 * inner, dtype=x.dtype, device=x.device)
    for first, weights in _unpacked(w1, call["w1_scale"], layout, 2 * inner, hidden):
        multiply(x, weights, first, rows, made, top_k=top_k)
    gated = torch.empty(len(rows.slots), inner, dtype=x.dtype, device=x.device)
    call["activation_func"](call["activation"], gated, made)
    del made, weights  # the next ones need room of their own
    products = call["intermediate_cache13"].view(-1)[: len(x) * top_k * hidden].view(-1, hidden)
    for first, weights in _unpacked(w2, call["w2_scale"], layout, hidden, inner):
        multiply_weighted(gated, weights, first, rows, products, call["topk_weights"])
    call["moe_sum"](products.view(-1, top_k, hidden), output, topk_ids, None)
    return output


@cache
def _tell_of_others() -> None:
    log.info("some experts are not MXFP4 alone, or spread over ranks: %s", _SLOWER)


def _covers(call: dict[str, Any]) -> bool:
    """Whether a call of vLLM's function has what is known here, and nothing else."""
    if call.keys() - _KNOWN - _ABSENT or any(call.get(name) is not None for name in _ABSENT):
        return False
    if call.get("apply_router_weight_on_input") or any(call.get(name) is None for name in _GIVEN):
        return False
    x, scales = call["hidden_states"], (call["w1_scale"], call["w2_scale"])
    if x.dtype is not torch.bfloat16 or any(scale.dtype is not torch.float8_e8m0fnu for scale in scales):
        return False
    hidden, inner = x.shape[1], call["w2"].shape[1] * TILE_K
    packed: bool = call["w1"].shape[1:] == (hidden // TILE_K, 4 * inner) and call["w2"].shape[2] == 2 * hidden
    return packed and hidden % COLUMNS == 0 and 2 * inner % COLUMNS == 0 and inner % AT_ONCE == 0


def _unpacked(words: Tensor, scales: Tensor, layout: PackedLayout, n: int, k: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of a first expert, and weights ``[experts, n, k]`` from there on, which last until the next."""
    at_once = min(len(words), max(1, _UNPACKED // (2 * n * k)))
    room = torch.empty(at_once, n, k, dtype=torch.bfloat16, device=words.device)
    for first in range(0, len(words), at_once):
        some = slice(first, first + at_once)
        weights = room[: len(words[some])]
        unpack(words[some], scales[some].view(torch.uint8), layout, weights)
        yield first, weights
