# SPDX-License-Identifier: Apache-2.0
"""What the decode scheme's chains have on the device from step to step: caches, and what tells attention of a step.

The scratch cache of a prefill is shared by the layers, since no layer needs another's. A chain's next step reads what
each layer wrote before, so here each layer has a cache of its own. As there, chat's blocks are never written.

Attention's metadata of a step differs from that of the step before in a few numbers. Where these can change in place, a
CUDA graph can read them. Some of vLLM's builders of metadata change it themselves, for its own graphs of drafts. Of
others it is known what they make of the length of a sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vllm_poc.worker.model.placement import ChainShape, Placement
from vllm_poc.worker.model.scratch import BatchShape, CacheForm, CacheGroup, bound_caches, cache_tensors

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter

#: Caches begin at multiples of so many bytes, as kernels may expect.
_ALIGNMENT = 4096
#: Tokens of a prefill where it shares blocks: more take memory, and make no GPU faster.
_SHARED_TOKENS = 8192
#: Builders whose metadata of a step has nothing of its position but the slots of its tokens, or nothing at all: of what
#: DeepSeek-V4 has yet to compress, and of the states of linear attention.
_WITHOUT_POSITION = {"CompressorMetadataBuilder", "GDNAttentionMetadataBuilder"}
#: Builders that need no number from the CPU but an upper bound: of DeepSeek-V4's compressed keys.
_ON_DEVICE = {"DeepseekV4FlashMLAMetadataBuilder"}
#: Whether a step of DeepSeek-V4 may leave out to compress 128 tokens. A graph is for steps that may not, too.
_BOUNDARY = "c128_boundary"
#: Says of attention with an index that it has none of its own.
_REUSES = "skip_topk"


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


class StepPlan:
    """The plan of a step of all ``chains``, for one step after the other.

    Attention is told the longest length that a chain will have, so kernels split their work the same way in each step.
    """

    def __init__(self, adapter: ModelAdapter, chains: ChainShape) -> None:
        place = Placement(chains, before=chains.capacity - 1)
        shape = BatchShape(chains.nonces, 1)
        self.plan: AttentionPlan = adapter.plan(shape, place)
        self._parts = [_Part.of(group, self.plan, shape, place) for group in adapter.groups]

    def move(self, before: Tensor) -> None:
        """Make it the plan of the step behind so many tokens, int64 ``[1]`` on the device, without asking the CPU."""
        self.plan.positions.copy_(before.expand_as(self.plan.positions))
        for part in self._parts:
            part.move(before)


def moves_in_place(groups: Sequence[CacheGroup]) -> bool:
    """Whether attention's metadata can go from step to step in place."""
    return all(_updates(group) or type(group.builder).__name__ in _WITHOUT_POSITION | _ON_DEVICE for group in groups)


def can_be_cut(adapter: ModelAdapter) -> bool:
    """Whether chat may run in the middle of forward passes.

    Not where a layer reads which tokens an earlier one has chosen, in memory that chat has, too.
    """
    return not any(getattr(part, _REUSES, False) for part in adapter.model.modules())


def _updates(group: CacheGroup) -> bool:
    return bool(getattr(group.builder, "supports_draft_decode_metadata_update", False))


class _Part(NamedTuple):
    """What layers of a group are told. ``table`` int64 ``[nonces, blocks]`` has the blocks of the chains."""

    group: CacheGroup
    table: Tensor
    common: CommonAttentionMetadata
    metadata: Any
    slots: Tensor

    @classmethod
    def of(cls, group: CacheGroup, plan: AttentionPlan, shape: BatchShape, place: Placement) -> _Part:
        name, device = next(iter(group.layers)), plan.positions.device
        metadata = plan.metadata[name]
        if getattr(metadata, _BOUNDARY, None) is not None:
            setattr(metadata, _BOUNDARY, None)
        common = group.common(shape, shape.positions(device, place.before), place)
        table = group.chain_blocks.table(place, shape.nonces, device)
        return cls(group, table, common, metadata, plan.slot_mapping[name])

    def move(self, before: Tensor) -> None:
        size, common, metadata = self.group.block_size, self.common, self.metadata
        blocks = self.table.index_select(1, before // size).squeeze(1)
        self.slots.copy_(blocks * size + before % size)
        for told in (common, metadata):
            _refill(told, "seq_lens", before + 1)
            _refill(told, "positions", before)
        if _updates(self.group):
            self.group.builder.update_draft_decode_metadata(metadata)
        elif type(self.group.builder).__name__ in _ON_DEVICE:
            common.slot_mapping.copy_(self.slots)
            # A copy, since it keeps what it was asked for once.
            made = self.group.builder.build(common_prefix_len=0, common_attn_metadata=copy.copy(common))
            _take_over(metadata, made)


def _refill(told: object, name: str, values: Tensor) -> None:
    tensor = getattr(told, name, None)
    if isinstance(tensor, Tensor):
        tensor.copy_(values.expand_as(tensor))


def _take_over(metadata: object, made: object) -> None:
    """Copy what was made anew to where kernels read it."""
    for name, tensor in vars(made).items():
        own = getattr(metadata, name, None)
        if isinstance(tensor, Tensor) and isinstance(own, Tensor) and own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
