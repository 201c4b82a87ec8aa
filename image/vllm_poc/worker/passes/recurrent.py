# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3: what its layers need to be captured, and to give a nonce the same bits alone and among others.

Its linear attention asks the CPU where the chunks of sequences begin. Its products in 16 bits, its routers', and those
that mix its residual streams, are split in ways that depend on the number of tokens. Here the first two go by the same
number of rows each time, whatever a batch holds, and the last are not split.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllm_poc.worker.model.scratch import BatchShape
from vllm_poc.worker.passes.attention import MAX_PLANS
from vllm_poc.worker.passes.operations import is_exact_router
from vllm_poc.worker.passes.plain import Patch

_LINEAR_ATTENTION = "Glm5NextLinearAttention"
#: Layers with caches: linear and latent attention, and what the index of the latter keeps.
_LAYERS = {_LINEAR_ATTENTION, "MLAAttention", "Glm5NextIndexerCache", "Glm5NextTailCache"}
#: Where the kernels of linear attention are.
_KERNELS = ("vllm.third_party.flash_linear_attention.", "vllm.models.glm5next.")
#: Where products that mix streams are split, and the functions that say into how many.
_MIXING = ("vllm.model_executor.kernels.mhc.tilelang_kernels", "vllm.model_executor.kernels.mhc.warmup")
_SPLITS = ("compute_num_split", "compute_mhc_pre_num_splits")
#: Rows of a product: as many as fill a card also where tensor parallelism leaves a layer few columns.
ROWS = 2048
#: Axes of a matrix of hidden states.
_AXES = 2


def is_recurrent(layers: Collection[nn.Module]) -> bool:
    """Whether all layers are those of GLM-5.3's attention, of which most keep a state instead of keys."""
    names = {type(layer).__name__ for layer in layers}
    return _LINEAR_ATTENTION in names and names <= _LAYERS


def recurrent_patches(model: nn.Module, shape: BatchShape, chunks: Chunks) -> Iterator[Patch]:
    """Replace what depends on the CPU or on the size of a batch."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_KERNELS):
            yield from _given(module, "prepare_chunk_indices", partial(chunks.indices, shape))
            yield from _given(module, "prepare_chunk_offsets", partial(chunks.offsets, shape))
    for name in _MIXING:
        for function in _SPLITS:
            yield from _given(sys.modules.get(name), function, _in_one)
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedLinearMethod":
            yield Patch(method, "apply", partial(_by_rows, method.apply))
        if type(module).__name__ == "GateLinear" and not is_exact_router(module):
            yield Patch(module, "forward", partial(_routed, module.forward))


class Chunks:
    """Which part of which sequence each chunk of a batch is, for the kernels of linear attention.

    Those of the last few shapes are kept: CUDA graphs read them.
    """

    def __init__(self) -> None:
        self._kept = OrderedDict[BatchShape, dict[str, Tensor]]()

    def indices(self, shape: BatchShape, starts: Tensor, size: int) -> Tensor:
        """Return ``[chunks, 2]``: the sequence of each chunk of ``size`` tokens, and its number there."""
        each = -(-shape.seq_len // size)

        def made() -> Tensor:
            numbers = torch.arange(shape.nonces * each, dtype=starts.dtype, device=starts.device)
            return torch.stack((numbers // each, numbers % each), dim=1)

        return self._find(shape, f"indices of {size}", made)

    def offsets(self, shape: BatchShape, starts: Tensor, size: int) -> Tensor:
        """Return ``[sequences + 1]``: the number of chunks before each sequence, and in all."""
        each = -(-shape.seq_len // size)
        return self._find(
            shape,
            f"offsets of {size}",
            lambda: torch.arange(0, each * shape.nonces + 1, each, device=starts.device),
        )

    def kept(self) -> list[Tensor]:
        """Return all that are kept."""
        return [tensor for some in self._kept.values() for tensor in some.values()]

    def _find(self, shape: BatchShape, name: str, made: Callable[[], Tensor]) -> Tensor:
        known = self._kept.get(shape, {}).get(name)
        if known is not None:
            return known
        found = made()
        # What is made while a graph is captured lies in the graph's memory, and has its values when that is replayed.
        if not found.is_cuda or not torch.cuda.is_current_stream_capturing():
            self._kept.setdefault(shape, {})[name] = found
            while len(self._kept) > MAX_PLANS:
                self._kept.popitem(last=False)
        return found


def _given(module: object, name: str, value: object) -> Iterator[Patch]:
    if hasattr(module, name):
        yield Patch(module, name, value)


def _in_one(*_: object) -> int:
    return 1


def _by_rows(apply: Callable[..., Tensor], layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.ndim != _AXES or x.dtype != layer.weight.dtype or bias is not None:
        return apply(layer, x, bias)
    out = torch.empty(len(x), len(layer.weight), dtype=x.dtype, device=x.device)
    for part, rows in zip(_parts(x), out.split(ROWS), strict=True):
        if len(rows) == ROWS:
            torch.mm(part, layer.weight.t(), out=rows)
        else:
            rows.copy_(torch.mm(part, layer.weight.t())[: len(rows)])
    return out


def _routed(forward: Callable[[Tensor], Tensor | tuple[Tensor, None]], x: Tensor) -> Tensor | tuple[Tensor, None]:
    found = [forward(part) for part in _parts(x)]
    if isinstance(found[0], tuple):
        return torch.cat([logits for logits, _ in found])[: len(x)], None
    return torch.cat(found)[: len(x)]


def _parts(x: Tensor) -> list[Tensor]:
    """Return the rows in parts of equal size, the last one with zeros below."""
    *whole, last = x.split(ROWS)
    return [*whole, last if len(last) == ROWS else nn.functional.pad(last, (0, 0, 0, ROWS - len(last)))]
