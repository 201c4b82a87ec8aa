# SPDX-License-Identifier: Apache-2.0
"""Each layer has memory of its own for chains, within the reserve, and a step finds what the steps before wrote."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

from vllm_poc.rpc import DecodeFacts, chain_nonces  # noqa: E402
from vllm_poc.worker.model.chain_cache import ChainReserve, can_be_cut  # noqa: E402
from vllm_poc.worker.model.placement import ChainShape, Placement  # noqa: E402
from vllm_poc.worker.model.scratch import BatchShape, CacheGroup  # noqa: E402

BLOCK, WIDTH = 4, 6
#: Of one layer, in float32.
BLOCK_BYTES = 4 * BLOCK * WIDTH
CPU = torch.device("cpu")


def a_layer(*, outermost: bool = True) -> Any:  # noqa: ANN401 - has only a cache
    sizes = (8, BLOCK, WIDTH) if outermost else (2, 8, BLOCK * WIDTH // 2)
    return SimpleNamespace(kv_cache=torch.full(sizes, 7.0))


def a_group(
    *layers: Any,  # noqa: ANN401
    builder: Any = None,  # noqa: ANN401
    block_dim: int = 0,
    stateful: bool = False,
    kept: int | None = None,
) -> CacheGroup:
    named = {f"layers.{number}.attn": layer for number, layer in enumerate(layers)}
    return CacheGroup(named, builder, block_dim, BLOCK, page_bytes=0, stateful=stateful, kept=kept)


def chains(nonces: int, tokens: int, *, steps: int = 1, together: int = 1) -> ChainShape:
    """As many tokens with the steps."""
    return ChainShape(nonces, tokens - steps, steps, together)


def a_reserve(*groups: CacheGroup, nbytes: int = 4096, max_tokens: int = 16) -> ChainReserve:
    return ChainReserve(groups, nbytes, CPU, max_tokens=max_tokens)


@pytest.mark.parametrize("block_dim", [0, 1])
def test_layers_have_caches_of_their_own_that_keep_what_they_hold(block_dim: int) -> None:
    layers = [a_layer(outermost=not block_dim) for _ in range(2)]
    own = [layer.kv_cache for layer in layers]
    reserve = a_reserve(a_group(*layers, block_dim=block_dim))
    cache = reserve.cache(chains(2, 6))
    with cache.bound():
        assert [layer.kv_cache.shape[block_dim] for layer in layers] == [1 + 2 * 2] * 2
        assert not any(layer.kv_cache.any() for layer in layers)
        for number, layer in enumerate(layers):
            layer.kv_cache.fill_(number + 1.0)
    assert [layer.kv_cache is cache for layer, cache in zip(layers, own, strict=True)] == [True, True]
    assert all(bool((cache == 7.0).all()) for cache in own)
    with cache.bound():
        assert [float(layer.kv_cache.unique()) for layer in layers] == [1.0, 2.0]
    with reserve.cache(chains(1, 6)).bound():
        assert not any(layer.kv_cache.any() for layer in layers), "other chains left something behind"


def test_the_reserve_holds_as_many_chains_as_the_server_reckons() -> None:
    reserve = a_reserve(a_group(a_layer(), a_layer()), a_group(a_layer()), nbytes=50 * BLOCK_BYTES)
    facts = facts_of(reserve)
    assert (facts["block_tokens"], facts["block_bytes"]) == ([BLOCK, BLOCK], [2 * BLOCK_BYTES, BLOCK_BYTES])
    assert chain_nonces(facts, 9) == 5, "each takes 3 blocks in 3 layers, and 3 more are left empty"
    reserve.cache(chains(5, 9))
    with pytest.raises(ValueError, match=r"6 chains of 9 tokens take .* set aside: use fewer"):
        reserve.cache(chains(6, 9))
    assert chain_nonces({**facts, "max_batch_nonces": 4}, 9) == 4
    assert chain_nonces(facts, 1000) == 0
    assert chain_nonces({**facts, "block_tokens": [], "block_bytes": [], "kept_blocks": []}, 9) == 0


def facts_of(reserve: ChainReserve) -> DecodeFacts:
    return DecodeFacts(
        refusal=None,
        rebuilt=False,
        reserve_bytes=reserve.chain_bytes,
        block_tokens=reserve.block_tokens,
        block_bytes=reserve.block_bytes,
        kept_blocks=reserve.kept_blocks,
        max_batch_nonces=16,
    )


def test_each_chain_has_states_of_its_own_whose_number_does_not_grow_with_its_tokens() -> None:
    layer: Any = SimpleNamespace(kv_cache=(torch.full((8, 2), 7.0), torch.full((8, 3), 7.0)))
    own = layer.kv_cache
    reserve = a_reserve(a_group(layer, stateful=True, kept=1))
    with reserve.cache(chains(3, 400)).bound():
        assert [tuple(state.shape) for state in layer.kv_cache] == [(1 + 3, 2), (1 + 3, 3)]
        assert not any(state.any() for state in layer.kv_cache)
    assert layer.kv_cache is own
    assert chain_nonces(facts_of(reserve), 400) == 16


def test_chains_keep_the_blocks_of_a_window_and_prefills_share_the_others() -> None:
    window = a_group(a_layer(), kept=2)
    # Of 16 tokens at a time, prefills share 4 blocks at most.
    reserve = a_reserve(window, nbytes=(4 + 1 + 5 * 2) * BLOCK_BYTES)
    assert reserve.chain_bytes == (1 + 5 * 2) * BLOCK_BYTES
    assert chain_nonces(facts_of(reserve), 400) == 5
    reserve.cache(chains(5, 400, steps=400 - 16))
    with pytest.raises(ValueError, match="set aside"):
        reserve.cache(chains(7, 400, steps=400 - 16))
    assert chain_nonces(facts_of(a_reserve(window, nbytes=4 * BLOCK_BYTES)), 400) == 0


def test_tokens_before_a_window_go_where_the_next_prefill_writes_and_steps_use_their_blocks_in_turn() -> None:
    group = a_group(a_layer(), kept=2)
    shape = ChainShape(nonces=3, seq_len=14, max_tokens=6, together=2)
    table = group.chain_blocks.table
    # Two blocks of each of two nonces are shared: 1 to 4. Then two blocks follow for each.
    assert table(Placement(shape), 2, CPU).tolist() == [[1, 2, 5, 6, 5], [3, 4, 7, 8, 7]]
    assert table(Placement(shape, first=2), 1, CPU).tolist() == [[1, 2, 9, 10, 9]]
    assert table(Placement(shape, before=14), 3, CPU).tolist() == [
        [5, 6, 5, 6, 5],
        [7, 8, 7, 8, 7],
        [9, 10, 9, 10, 9],
    ]
    assert group.chain_blocks.count(shape) == 11
    ring = a_group(a_layer(), kept=1).chain_blocks
    assert ring.table(Placement(shape), 2, CPU).tolist() == [[1] * 5, [2] * 5]
    assert ring.count(shape) == 4


def test_a_step_is_told_of_all_tokens_before_it_and_writes_behind_them() -> None:
    told: list[Any] = []

    def build(common_prefix_len: int, common_attn_metadata: Any) -> Any:  # noqa: ANN401
        told.append(common_attn_metadata)
        return SimpleNamespace()

    group = a_group(a_layer(), builder=SimpleNamespace(build=build))
    prefill, step = BatchShape(1, 3), BatchShape(2, 1)
    _, second = group.plan(prefill, prefill.positions(CPU), Placement(chains(2, 9), first=1))
    _, third = group.plan(step, step.positions(CPU, before=5), Placement(chains(2, 9), before=5))
    # Three blocks for each chain, from number 1 on.
    assert [told[0].block_table_tensor.tolist(), second.tolist()] == [[[4, 5, 6]], [16, 17, 18]]
    assert [told[1].block_table_tensor.tolist(), third.tolist()] == [[[1, 2, 3], [4, 5, 6]], [4 + 5, 16 + 5]]
    assert [common.seq_lens.tolist() for common in told] == [[3], [6, 6]]
    assert [common.max_seq_len for common in told] == [3, 6]
    assert [common.max_query_len for common in told] == [3, 1]
    assert [common.is_prefilling.tolist() for common in told] == [[True], [False, False]]
    assert told[1].positions.tolist() == [5, 5]


def test_passes_are_cut_unless_a_layer_reads_what_an_earlier_one_has_chosen() -> None:
    adapter: Any = SimpleNamespace(model=torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert can_be_cut(adapter)
    adapter.model[0].skip_topk = True
    assert not can_be_cut(adapter)
