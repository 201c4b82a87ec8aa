# SPDX-License-Identifier: Apache-2.0
"""What the decode scheme's chains have on the device from step to step: keys and values, or states.

The scratch cache of a prefill is shared by the layers, since no layer needs another's. A chain's next step reads what
each layer wrote before, so here each layer has a cache of its own. As there, chat's blocks are never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_poc.worker.model.placement import ChainShape
from vllm_poc.worker.model.scratch import CacheForm, CacheGroup, bound_caches, cache_tensors

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

#: Caches begin at multiples of so many bytes, as kernels may expect.
_ALIGNMENT = 4096
#: Tokens of a prefill where it shares blocks: more take memory, and make no GPU faster.
_SHARED_TOKENS = 8192


class ChainReserve:
    """Memory of ``nbytes`` that is set aside for chains.

    Up to ``max_tokens`` of their tokens can be prefilled at a time, or fewer where prefills share blocks.
    """

    def __init__(self, groups: Sequence[CacheGroup], nbytes: int, device: torch.device, *, max_tokens: int) -> None:
        self.nbytes = nbytes
        self._groups = groups
        shares = any(group.chain_blocks.most_shared(1) for group in groups)
        #: How many tokens to prefill at a time.
        self.prefill_tokens = min(max_tokens, _SHARED_TOKENS) if shares else max_tokens
        tensors = sum(len(cache_tensors(layer.kv_cache)) for group in groups for layer in group.layers.values())
        self._memory = torch.zeros(nbytes + _ALIGNMENT * (1 + tensors), dtype=torch.uint8, device=device)

    @property
    def storages(self) -> set[int]:
        """The address of the memory."""
        return {self._memory.untyped_storage().data_ptr()}

    @property
    def block_tokens(self) -> list[int]:
        """How many tokens a block holds, by kind of attention."""
        return [group.block_size for group in self._groups]

    @property
    def block_bytes(self) -> list[int]:
        """What a block takes in all layers, by kind of attention."""
        return [sum(form.nbytes for _, _, forms in _layers([group], [1]) for form in forms) for group in self._groups]

    @property
    def kept_blocks(self) -> list[int]:
        """How many blocks a chain keeps at most, by kind of attention; 0 where it keeps all."""
        return [group.kept or 0 for group in self._groups]

    @property
    def chain_bytes(self) -> int:
        """What is left for chains beside the blocks that prefills share."""
        shared = [group.chain_blocks.most_shared(self.prefill_tokens) for group in self._groups]
        return max(0, self.nbytes - sum(map(int.__mul__, shared, self.block_bytes)))

    def cache(self, chains: ChainShape) -> ChainCache:
        """Return an empty cache for chains of so many tokens, the prefill's and the steps'.

        Whatever had a cache before must not use it any more. ValueError if the reserve is too small.
        """
        counts = [group.chain_blocks.count(chains) for group in self._groups]
        needed = sum(map(int.__mul__, counts, self.block_bytes))
        if needed > self.nbytes:
            raise ValueError(
                f"{chains.nonces} chains of {chains.capacity} tokens take {needed} bytes, and {self.nbytes} are set "
                "aside: use fewer nonces or fewer tokens"
            )
        start = -self._memory.data_ptr() % _ALIGNMENT
        layers: list[tuple[Attention, Tensor | tuple[Tensor, ...]]] = []
        for layer, group, forms in _layers(self._groups, counts):
            tensors = list[Tensor]()
            for form in forms:
                tensors.append(form.laid(self._memory[start : start + form.nbytes]))
                start += form.nbytes + -form.nbytes % _ALIGNMENT
            layers.append((layer, tuple(tensors) if group.stateful else tensors[0]))
        # Kernels read whole blocks: a NaN that other chains left behind would spread.
        self._memory.zero_()
        return ChainCache(layers)


class ChainCache:
    """The caches of the layers for some chains, which keep what is written until the reserve makes others."""

    def __init__(self, layers: Sequence[tuple[Attention, Tensor | tuple[Tensor, ...]]]) -> None:
        self._layers = layers

    def bound(self) -> AbstractContextManager[None]:
        """Make the layers use these caches, and give them back their own at the end."""
        return bound_caches(self._layers)


def _layers(
    groups: Sequence[CacheGroup], counts: Sequence[int]
) -> Iterator[tuple[Attention, CacheGroup, list[CacheForm]]]:
    """Yield each layer, its group, and the forms of its cache with as many blocks as the group's count says."""
    for group, blocks in zip(groups, counts, strict=True):
        for name, layer in group.layers.items():
            yield layer, group, [CacheForm.of(name, own, group, blocks) for own in cache_tensors(layer.kv_cache)]
