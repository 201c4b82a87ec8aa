# SPDX-License-Identifier: Apache-2.0
"""vLLM's dynamic quantisation of a layer's input by groups, with a kernel that is nearer to the memory's bandwidth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from vllm_poc.kernels import layers
from vllm_poc.worker.passes.plain import Patch

_NAME = "per_token_group_quant_fp8"
_EXECUTOR = "vllm.model_executor"
#: Where layers, experts and layers by FlashInfer look the function up. (DeepGEMM's experts bring their own memory for
#: the result, between their products; that is left to vLLM.)
_CALLERS = (
    f"{_EXECUTOR}.layers.quantization.utils.fp8_utils",
    f"{_EXECUTOR}.layers.fused_moe.utils",
    f"{_EXECUTOR}.kernels.linear.scaled_mm.flashinfer",
)
#: The first cards with numbers of 8 bits.
_CAPABILITY = (8, 9)
#: Axes of a matrix. Layers have no other inputs.
_AXES = 2
#: The size of groups in checkpoints that are quantised by blocks.
_GROUP = 128
#: Columns of scales begin at multiples of so many, where they are to be read as tiles.
_ALIGNED = 4


def quantisation_patches() -> Iterator[Patch]:
    """Replace vLLM's function where the layers and experts of the served model look it up."""
    if torch.cuda.get_device_capability() < _CAPABILITY:
        return
    modules = [sys.modules.get(name) for name in _CALLERS]
    asks_for_powers = getattr(modules[0], "is_deep_gemm_e8m0_used", None)
    for module in modules:
        original = getattr(module, _NAME, None)
        if original is not None and asks_for_powers is not None:
            yield Patch(module, _NAME, partial(_quantised, original, asks_for_powers))


def _quantised(
    original: Callable[..., tuple[Tensor, Tensor]],
    asks_for_powers: Callable[[], bool],
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
    **others: object,
) -> tuple[Tensor, Tensor]:
    if others or out_q is not None or dtype not in {None, torch.float8_e4m3fn} or not _covers(x, group_size):
        return original(x, group_size, eps, dtype, column_major_scales, tma_aligned_scales, out_q, use_ue8m0, **others)
    rows, groups = x.shape[0], x.shape[1] // group_size
    column = -(-rows // _ALIGNED) * _ALIGNED if tma_aligned_scales else rows
    strides = (1, column) if column_major_scales else (groups, 1)
    scales = torch.empty_strided((rows, groups), strides, dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    powers = asks_for_powers() if use_ue8m0 is None else use_ue8m0
    layers.quantise(x, out, scales, epsilon=eps, powers_of_two=powers)
    return out, scales


def _covers(x: Tensor, group_size: int) -> bool:
    plain = x.ndim == _AXES and x.numel() > 0 and x.is_contiguous() and x.dtype in {torch.float16, torch.bfloat16}
    return plain and group_size == _GROUP and x.shape[1] % group_size == 0
