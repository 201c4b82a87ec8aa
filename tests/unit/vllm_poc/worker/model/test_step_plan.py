# SPDX-License-Identifier: Apache-2.0
"""The plan of a step moves on by itself: where tokens go, how long sequences are, what builders make of that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

from vllm_poc.worker.model.adapter import AttentionPlan  # noqa: E402
from vllm_poc.worker.model.chain_cache import StepPlan, moves_in_place  # noqa: E402
from vllm_poc.worker.model.placement import ChainShape  # noqa: E402
from vllm_poc.worker.model.scratch import BatchShape, CacheGroup  # noqa: E402

BLOCK = 4
CPU = torch.device("cpu")
#: Two chains of 9 tokens and 7 steps, one at a time in a prefill.
CHAINS = ChainShape(nonces=2, seq_len=9, max_tokens=7, together=1)


class Draft:
    """Updates its metadata as vLLM's graphs of drafts let it."""

    supports_draft_decode_metadata_update = True

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:  # noqa: ANN401
        return SimpleNamespace(seq_lens=common_attn_metadata.seq_lens, doubled=common_attn_metadata.seq_lens * 2)

    def update_draft_decode_metadata(self, metadata: Any) -> None:  # noqa: ANN401
        metadata.doubled.copy_(metadata.seq_lens * 2)


class DeepseekV4FlashMLAMetadataBuilder:
    """Makes metadata of lengths and slots, and keeps in what it is told that it was asked."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:  # noqa: ANN401
        assert common_attn_metadata._num_computed_tokens_cache is None
        common_attn_metadata.compute_num_computed_tokens()
        lengths = common_attn_metadata.seq_lens + common_attn_metadata.positions
        return SimpleNamespace(lengths=lengths, slots=common_attn_metadata.slot_mapping + 1000)


class CompressorMetadataBuilder:
    """Says of one step whether it completes something."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:  # noqa: ANN401
        return SimpleNamespace(slot_mapping=common_attn_metadata.slot_mapping, c128_boundary=False)


class Unknown:
    """Has no way to move on."""


def a_group(builder: Any, kept: int | None = None) -> CacheGroup:  # noqa: ANN401
    layers: Any = {type(builder).__name__: None}
    return CacheGroup(layers, builder, block_dim=0, block_size=BLOCK, page_bytes=0, kept=kept)


def a_plan(*groups: CacheGroup) -> StepPlan:
    def plan(shape: BatchShape, place: Any) -> AttentionPlan:  # noqa: ANN401
        positions = shape.positions(CPU, place.before)
        made = AttentionPlan(shape, positions.clone(), {}, {})
        for group in groups:
            metadata, slots = group.plan(shape, positions, place)
            made.metadata.update(dict.fromkeys(group.layers, metadata))
            made.slot_mapping.update(dict.fromkeys(group.layers, slots))
        return made

    adapter: Any = SimpleNamespace(groups=groups, plan=plan)
    return StepPlan(adapter, CHAINS)


def test_what_a_backend_updates_itself_follows_the_lengths() -> None:
    moved = a_plan(a_group(Draft()))
    for before in (9, 13):
        moved.move(torch.tensor([before]))
        assert moved.plan.positions.tolist() == [before] * 2
        assert moved.plan.metadata["Draft"].doubled.tolist() == [2 * (before + 1)] * 2
        # Four blocks for each chain, from number 1 on.
        assert moved.plan.slot_mapping["Draft"].tolist() == [BLOCK + before, 5 * BLOCK + before]


def test_metadata_that_needs_no_number_of_the_cpu_is_made_anew_where_it_was() -> None:
    moved = a_plan(a_group(DeepseekV4FlashMLAMetadataBuilder()))
    metadata = moved.plan.metadata["DeepseekV4FlashMLAMetadataBuilder"]
    addresses = metadata.lengths.data_ptr(), metadata.slots.data_ptr()
    for before in (9, 13):
        moved.move(torch.tensor([before]))
        assert metadata.lengths.tolist() == [2 * before + 1] * 2
        assert metadata.slots.tolist() == [1000 + BLOCK + before, 1000 + 5 * BLOCK + before]
    assert (metadata.lengths.data_ptr(), metadata.slots.data_ptr()) == addresses


def test_blocks_of_a_window_are_used_in_turn_and_every_step_looks_what_is_complete() -> None:
    moved = a_plan(a_group(CompressorMetadataBuilder(), kept=2))
    metadata = moved.plan.metadata["CompressorMetadataBuilder"]
    assert metadata.c128_boundary is None
    # One block of the only prefill is shared. Then two blocks follow for each chain: 2 and 3, 4 and 5.
    for before, slots in ((9, [2 * BLOCK + 1, 4 * BLOCK + 1]), (12, [3 * BLOCK, 5 * BLOCK]), (15, [15, 23])):
        moved.move(torch.tensor([before]))
        assert metadata.slot_mapping.tolist() == slots


def test_attention_moves_in_place_if_all_of_it_is_known() -> None:
    known = [a_group(Draft()), a_group(DeepseekV4FlashMLAMetadataBuilder()), a_group(CompressorMetadataBuilder())]
    assert moves_in_place(known)
    assert not moves_in_place([*known, a_group(Unknown())])
