# SPDX-License-Identifier: Apache-2.0
"""The scratch KV cache: PoC's forward pass writes keys and values here, never into the chat's blocks.

A pass whose attention reads them straight from the layer has none (``Pass.needs_cache``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vllm_poc.worker.model.adapter import CacheGroup

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention


class CacheForm(NamedTuple):
    """What the attention kernels see of a KV cache. Layers of equal form can share one tensor.

    ``strides`` orders the dimensions from the widest stride to the narrowest.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, cache: Tensor, group: CacheGroup, blocks: int) -> CacheForm:
        """Return the form of a layer's ``cache`` if it had only ``blocks`` blocks."""
        shape = list(cache.shape)
        shape[group.block_dim] = blocks
        strides = sorted(range(cache.ndim), key=cache.stride, reverse=True)
        return cls(tuple(shape), tuple(strides), cache.dtype)

    def allocate(self, device: torch.device) -> Tensor:
        """Return zeros of this form."""
        dense = torch.zeros([self.shape[dim] for dim in self.strides], dtype=self.dtype, device=device)
        return dense.permute([self.strides.index(dim) for dim in range(dense.ndim)])


class ScratchCache:
    """One scratch tensor for each form of KV cache, shared by all layers of that form.

    A layer writes all keys and values of the batch before it reads them, so no layer needs
    another's. Holds any batch of at most ``max_nonces`` sequences and ``max_tokens`` tokens.
    """

    def __init__(self, groups: Sequence[CacheGroup], *, max_nonces: int, max_tokens: int) -> None:
        self._tensors: dict[CacheForm, Tensor] = {}
        self._layers: list[tuple[Attention, Tensor]] = []
        for group in groups:
            # Each sequence leaves at most one block partly empty.
            blocks = -(-max_tokens // group.block_size) + max_nonces
            for layer in group.layers.values():
                self._layers.append((layer, self._tensor(layer.kv_cache, group, blocks)))

    @property
    def nbytes(self) -> int:
        """Device memory that the scratch takes, in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Make the layers use the scratch, zeroed, and give them back their own caches at the end."""
        # Kernels read whole blocks: a NaN that an earlier batch left behind a sequence's end would spread.
        for tensor in self._tensors.values():
            tensor.zero_()
        own = [layer.kv_cache for layer, _ in self._layers]
        try:
            for layer, tensor in self._layers:
                layer.kv_cache = tensor
            yield
        finally:
            for (layer, _), cache in zip(self._layers, own, strict=True):
                layer.kv_cache = cache

    def _tensor(self, cache: Tensor, group: CacheGroup, blocks: int) -> Tensor:
        form = CacheForm.of(cache, group, blocks)
        if form not in self._tensors:
            self._tensors[form] = form.allocate(cache.device)
        return self._tensors[form]
