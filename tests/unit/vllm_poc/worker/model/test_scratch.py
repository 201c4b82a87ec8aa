# SPDX-License-Identifier: Apache-2.0
"""Which layers share a scratch cache, and that it has the form of theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

from vllm_poc.worker.model.scratch import (  # noqa: E402
    BatchShape,
    CacheGroup,
    ScratchCache,
    _borders,
    cache_group,
)

BLOCK, WIDTH = 4, 6
NONCES, TOKENS = 3, 20
SHAPE = BatchShape(NONCES, 6)


def a_layer(*, page: int = BLOCK * WIDTH) -> Any:  # noqa: ANN401 - has only a cache
    """Return a layer whose blocks begin ``page`` numbers apart."""
    memory = torch.full((8 * page,), 7.0)
    return SimpleNamespace(kv_cache=memory.as_strided((8, BLOCK, WIDTH), (page, WIDTH, 1)))


def a_group(page: int = BLOCK * WIDTH, **layers: Any) -> CacheGroup:  # noqa: ANN401
    named = {name.replace("_", "."): layer for name, layer in layers.items()}
    return CacheGroup(layers=named, builder=None, block_dim=0, block_size=BLOCK, page_bytes=4 * page)


def test_layers_of_one_role_share_a_cache_and_others_do_not() -> None:
    first, second, window = a_layer(), a_layer(), a_layer()
    own = first.kv_cache
    scratch = ScratchCache(
        [a_group(layers_0_attn=first, layers_1_attn=second), a_group(layers_0_attn_window=window)],
        max_nonces=NONCES,
        max_tokens=TOKENS,
    )
    with scratch.bound(SHAPE):
        assert first.kv_cache is second.kv_cache
        assert first.kv_cache.data_ptr() not in {own.data_ptr(), window.kv_cache.data_ptr()}
        first.kv_cache.fill_(1.0)
        assert not window.kv_cache.any()
    assert first.kv_cache is own
    assert bool((own == 7.0).all())


def test_blocks_begin_where_kernels_expect_them() -> None:
    """Blocks of several layers lie between one another's: only the padding of one is kept."""
    page, apart = 28, 5 * 28
    layer = a_layer(page=apart)
    scratch = ScratchCache([a_group(page, layers_0_attn=layer)], max_nonces=NONCES, max_tokens=TOKENS)
    with scratch.bound(SHAPE):
        assert layer.kv_cache.stride() == (page, WIDTH, 1)
    assert scratch.nbytes == 4 * page * (1 + TOKENS // BLOCK + NONCES)


def test_kernels_blocks_among_what_other_layers_keep_are_those_of_the_layer() -> None:
    """GLM-5.3's index has 17 of the kernel's blocks in one of vLLM's, and counts those of other layers between."""
    blocks, own, apart = 3, 17, 40
    cache = torch.zeros(blocks * apart * 6).as_strided(((blocks - 1) * apart + own, 2, 3), (6, 3, 1))
    spec = SimpleNamespace(block_size=8 * own, page_size_bytes=4 * 6 * own)
    group: Any = SimpleNamespace(
        layer_names=["layers.3.index"],
        kv_cache_spec=spec,
        kernel_block_size=8,
        kernel_block_stride=apart,
        get_metadata_builder=lambda _: None,
    )
    layers = {"layers.3.index": SimpleNamespace(kv_cache=cache)}
    runner: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
        kv_cache_config=SimpleNamespace(num_blocks=blocks),
    )
    found = cache_group(runner, group)
    assert (found.block_dim, found.block_size, found.page_bytes) == (0, 8, 24)


def test_all_sequences_write_their_states_into_one_entry() -> None:
    """Nobody reads them: they are for tokens that come later."""
    states = torch.full((8, 2, 3), 7.0), torch.full((8, 5), 7.0, dtype=torch.bfloat16)
    first, second = (SimpleNamespace(kv_cache=states) for _ in range(2))
    group = CacheGroup(
        layers={"layers.0.attn": first, "layers.1.attn": second},
        builder=None,
        block_dim=0,
        block_size=2048,
        page_bytes=0,
        stateful=True,
    )
    scratch = ScratchCache([group], max_nonces=256, max_tokens=32_768)
    with scratch.bound(SHAPE):
        assert first.kv_cache[0] is second.kv_cache[0]
        assert [(cache.shape, cache.dtype) for cache in first.kv_cache] == [
            ((2, 2, 3), torch.float32),
            ((2, 5), torch.bfloat16),
        ]
    assert first.kv_cache is states
    assert scratch.nbytes == 2 * (2 * 3 * 4 + 5 * 2)


def test_the_first_entry_of_states_is_left_out() -> None:
    told: list[Any] = []

    def build(common_prefix_len: int, common_attn_metadata: Any) -> Any:  # noqa: ANN401
        told.append(common_attn_metadata.block_table_tensor)
        return SimpleNamespace()

    builder: Any = SimpleNamespace(build=build)
    group = CacheGroup({}, builder, block_dim=0, block_size=8, page_bytes=0, stateful=True)
    group.plan(BatchShape(3, 16), torch.arange(16).repeat(3))
    assert told[0].tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("shape", [BatchShape(3, 6), BatchShape(1, 20), BatchShape(2, 9), BatchShape(3, 1)])
def test_every_batch_within_the_limits_has_its_blocks(shape: BatchShape) -> None:
    group, layer = a_group(), a_layer()
    scratch = ScratchCache([a_group(layers_0_attn=layer)], max_nonces=NONCES, max_tokens=TOKENS)
    with scratch.bound(shape):
        assert group.blocks(shape) <= len(layer.kv_cache)


@pytest.mark.parametrize(
    ("spec", "layers", "expected"),
    [
        ({"block_size": 16}, [{}], {16}),
        ({"block_size": 16, "sliding_window": 128}, [{}], {16, 128}),
        ({"block_size": 16, "attention_chunk_size": 8192}, [{}, {}], {16, 8192}),
        ({"block_size": 64}, [{"sliding_window": 128}, {"sliding_window": 512}], {64, 128, 512}),
        ({"block_size": 8, "sliding_window": None}, [{"sliding_window": 4, "attention_chunk_size": 2}], {8, 4, 2}),
        ({"block_size": 16, "sliding_window": 0}, [{"sliding_window": -1}], {16}),
        ({"block_size": 16}, [{"sliding_window": (-1, -1)}], {16}),
        ({}, [], set()),
    ],
    ids=["blocks", "window", "chunks", "of layers", "of layers alone", "none in numbers", "in pairs", "nothing"],
)  # fmt: skip
def test_borders_are_those_of_blocks_windows_and_chunks(
    spec: dict[str, Any], layers: list[dict[str, Any]], expected: set[int]
) -> None:
    found = _borders(SimpleNamespace(**spec), *(SimpleNamespace(**layer) for layer in layers))
    assert found == expected


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (FullAttentionSpec, {}, {16}),
        (FullAttentionSpec, {"sliding_window": 32}, {16, 32}),
        (FullAttentionSpec, {"attention_chunk_size": 48}, {16, 48}),
        (SlidingWindowSpec, {"sliding_window": 32}, {16, 32}),
        (ChunkedLocalAttentionSpec, {"attention_chunk_size": 48}, {16, 48}),
    ],
)
def test_a_group_has_the_borders_of_vllms_own_specification(
    kind: Any,  # noqa: ANN401
    fields: dict[str, int],
    expected: set[int],
) -> None:
    """So that a release which calls them otherwise shows."""
    spec = kind(block_size=16, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32, **fields)
    layers = {"layers.0.attn": SimpleNamespace(kv_cache=torch.zeros(2, 8, 16, WIDTH))}
    group: Any = SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec, get_metadata_builder=lambda _: None)
    runner: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
        kv_cache_config=SimpleNamespace(num_blocks=8),
    )
    assert cache_group(runner, group).borders == expected
