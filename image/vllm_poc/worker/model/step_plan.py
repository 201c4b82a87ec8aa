# SPDX-License-Identifier: Apache-2.0
"""What tells attention of a step of the decode scheme, where that can change in place.

Attention's metadata of a step differs from that of the step before in a few numbers. Where these can change in place, a
CUDA graph can read them. Some of vLLM's builders of metadata change it themselves, for its own graphs of drafts. Of
others it is known what they make of the length of a sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from vllm_poc.worker.model.placement import ChainShape, Placement
from vllm_poc.worker.model.scratch import BatchShape, CacheGroup

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter

#: Builders whose metadata of a step has nothing of its position but the slots of its tokens, or nothing at all: of what
#: DeepSeek-V4 has yet to compress, and of the states of linear attention.
_WITHOUT_POSITION = {"CompressorMetadataBuilder", "GDNAttentionMetadataBuilder"}
#: Builders that need no number from the CPU but an upper bound: of DeepSeek-V4's compressed keys.
_ON_DEVICE = {"DeepseekV4FlashMLAMetadataBuilder"}
#: Whether a step of DeepSeek-V4 may leave out to compress 128 tokens. A graph is for steps that may not, too.
_BOUNDARY = "c128_boundary"


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
