# SPDX-License-Identifier: Apache-2.0
"""vLLM's dynamic quantisation of a layer's input by groups, with a kernel that is nearer to the memory's bandwidth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from vllm_poc.kernels import quantised
from vllm_poc.worker.fusion.patches import Patch

_NAME = "per_token_group_quant_fp8"
_LAYERS = "vllm.model_executor.layers"
#: Where the function is looked up by those that call it: layers, experts, and the experts of DeepGEMM.
_CALLERS = (
    f"{_LAYERS}.quantization.utils.fp8_utils",
    f"{_LAYERS}.fused_moe.utils",
    f"{_LAYERS}.fused_moe.experts.deep_gemm_moe",
)
#: Axes of a matrix. Layers have no other inputs.
_AXES = 2
#: The size of groups in all checkpoints that have any.
_GROUP = 128
#: Columns of scales begin at multiples of so many, where they are to be read as tiles.
_ALIGNED = 4


def quantisation_patches() -> Iterator[Patch]:
    """Replace vLLM's function wherever the served model may call it."""
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
) -> tuple[Tensor, Tensor]:
    if out_q is not None or dtype not in {None, torch.float8_e4m3fn} or not _covers(x, group_size):
        return original(x, group_size, eps, dtype, column_major_scales, tma_aligned_scales, out_q, use_ue8m0)
    rows, groups = x.shape[0], x.shape[1] // group_size
    column = -(-rows // _ALIGNED) * _ALIGNED if tma_aligned_scales else rows
    strides = (1, column) if column_major_scales else (groups, 1)
    scales = torch.empty_strided((rows, groups), strides, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    powers = asks_for_powers() if use_ue8m0 is None else use_ue8m0
    quantised.quantise(x, out, scales, epsilon=eps, powers_of_two=powers)
    return out, scales


def _covers(x: Tensor, group_size: int) -> bool:
    rows = x.ndim == _AXES and x.numel() > 0 and x.is_contiguous() and x.dtype in {torch.float16, torch.bfloat16}
    return rows and group_size == _GROUP and x.shape[1] % group_size == 0
