# SPDX-License-Identifier: Apache-2.0
"""What the decode scheme's chains have on the device from step to step: a KV cache, and what tells attention of a step.

The scratch cache of a prefill is shared by the layers, since no layer needs another's. A chain's next step reads what
each layer wrote before, so here each layer has a cache of its own. As there, chat's blocks are never written.

Attention's metadata of a step differs from that of the step before in a few numbers. Where a backend lets these change
in place, a CUDA graph can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_poc.worker.model.scratch import (
    BatchShape,
    CacheForm,
    CacheGroup,
    Placement,
    UnsupportedModelError,
    bound_caches,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

    from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter

#: Caches begin at multiples of so many bytes, as kernels may expect.
_ALIGNMENT = 4096


class ChainReserve:
    """Memory of ``nbytes`` that is set aside for chains. UnsupportedModelError if layers keep states or have none."""

    def __init__(self, groups: Sequence[CacheGroup], nbytes: int, device: torch.device) -> None:
        for group in groups:
            if group.stateful or any(not isinstance(layer.kv_cache, Tensor) for layer in group.layers.values()):
                raise UnsupportedModelError(
                    "The decode scheme is not proven with attention that keeps states: serve another model."
                )
        self.nbytes = nbytes
        self._groups = groups
        layers = sum(len(group.layers) for group in groups)
        self._memory = torch.zeros(nbytes + _ALIGNMENT * (1 + layers), dtype=torch.uint8, device=device)

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
        return [sum(_form(name, group, 1).nbytes for name in group.layers) for group in self._groups]

    def cache(self, shape: BatchShape) -> ChainCache:
        """Return an empty cache for chains of so many tokens, the prefill's and the steps'.

        Whatever had a cache before must not use it any more. ValueError if the reserve is too small.
        """
        needed = sum(size * group.blocks(shape) for group, size in zip(self._groups, self.block_bytes, strict=True))
        if needed > self.nbytes:
            raise ValueError(
                f"{shape.nonces} chains of {shape.seq_len} tokens take {needed} bytes, and {self.nbytes} are set aside"
                ": use fewer nonces or fewer tokens"
            )
        start = -self._memory.data_ptr() % _ALIGNMENT
        layers: list[tuple[Attention, Tensor]] = []
        for group in self._groups:
            for name, layer in group.layers.items():
                form = _form(name, group, group.blocks(shape))
                layers.append((layer, form.laid(self._memory[start : start + form.nbytes])))
                start += form.nbytes + -form.nbytes % _ALIGNMENT
        # Kernels read whole blocks: a NaN that other chains left behind would spread.
        self._memory.zero_()
        return ChainCache(layers)


class ChainCache:
    """The caches of the layers for some chains, which keep what is written until the reserve makes others."""

    def __init__(self, layers: Sequence[tuple[Attention, Tensor]]) -> None:
        self._layers = layers

    def bound(self) -> AbstractContextManager[None]:
        """Make the layers use these caches, and give them back their own at the end."""
        return bound_caches(self._layers)


def _form(name: str, group: CacheGroup, blocks: int) -> CacheForm:
    return CacheForm.of(name, group.layers[name].kv_cache, group, blocks)


class StepPlan:
    """The plan of a step of ``nonces`` chains, each with room for ``capacity`` tokens, for one step after the other.

    Attention is told the longest length that a chain will have, so kernels split their work the same way in each step.
    """

    def __init__(self, adapter: ModelAdapter, nonces: int, capacity: int) -> None:
        place = Placement(capacity, before=capacity - 1)
        self.plan: AttentionPlan = adapter.plan(BatchShape(nonces, 1), place)
        self._groups = adapter.groups
        slots = {next(iter(group.layers)): self.plan.slot_mapping[next(iter(group.layers))] for group in adapter.groups}
        # A sequence's blocks lie in a row, so its slots do.
        self._first_slots = {name: mapping - place.before for name, mapping in slots.items()}

    def move(self, before: Tensor) -> None:
        """Make it the plan of the step behind so many tokens, int64 ``[1]`` on the device, without asking the CPU."""
        self.plan.positions.copy_(before.expand_as(self.plan.positions))
        for group in self._groups:
            name = next(iter(group.layers))
            metadata = self.plan.metadata[name]
            metadata.seq_lens.copy_((before + 1).expand_as(metadata.seq_lens))
            self.plan.slot_mapping[name].copy_(self._first_slots[name] + before)
            group.builder.update_draft_decode_metadata(metadata)


def moves_in_place(groups: Sequence[CacheGroup]) -> bool:
    """Whether attention's metadata can go from step to step in place, as vLLM's own graphs of drafts let it."""
    return all(getattr(group.builder, "supports_draft_decode_metadata_update", False) for group in groups)
