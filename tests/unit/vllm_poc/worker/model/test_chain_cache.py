# SPDX-License-Identifier: Apache-2.0
"""Each layer has memory of its own for chains, within the reserve, and a step finds what the steps before wrote."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

from vllm_poc.rpc import DecodeFacts, chain_nonces  # noqa: E402
from vllm_poc.worker.model.chain_cache import ChainReserve  # noqa: E402
from vllm_poc.worker.model.scratch import (  # noqa: E402
    BatchShape,
    CacheGroup,
    Placement,
    UnsupportedModelError,
)

BLOCK, WIDTH = 4, 6
#: Of one layer, in float32.
BLOCK_BYTES = 4 * BLOCK * WIDTH
CPU = torch.device("cpu")


def a_layer(*, outermost: bool = True) -> Any:  # noqa: ANN401 - has only a cache
    sizes = (8, BLOCK, WIDTH) if outermost else (2, 8, BLOCK * WIDTH // 2)
    return SimpleNamespace(kv_cache=torch.full(sizes, 7.0))


def a_group(*layers: Any, builder: Any = None, block_dim: int = 0) -> CacheGroup:  # noqa: ANN401
    named = {f"layers.{number}.attn": layer for number, layer in enumerate(layers)}
    return CacheGroup(layers=named, builder=builder, block_dim=block_dim, block_size=BLOCK, page_bytes=0)


@pytest.mark.parametrize("block_dim", [0, 1])
def test_layers_have_caches_of_their_own_that_keep_what_they_hold(block_dim: int) -> None:
    layers = [a_layer(outermost=not block_dim) for _ in range(2)]
    own = [layer.kv_cache for layer in layers]
    reserve = ChainReserve([a_group(*layers, block_dim=block_dim)], 4096, CPU)
    cache = reserve.cache(BatchShape(2, 6))
    with cache.bound():
        assert [layer.kv_cache.shape[block_dim] for layer in layers] == [1 + 2 * 2] * 2
        assert not any(layer.kv_cache.any() for layer in layers)
        for number, layer in enumerate(layers):
            layer.kv_cache.fill_(number + 1.0)
    assert [layer.kv_cache is cache for layer, cache in zip(layers, own, strict=True)] == [True, True]
    assert all(bool((cache == 7.0).all()) for cache in own)
    with cache.bound():
        assert [float(layer.kv_cache.unique()) for layer in layers] == [1.0, 2.0]
    with reserve.cache(BatchShape(1, 6)).bound():
        assert not any(layer.kv_cache.any() for layer in layers), "other chains left something behind"


def test_the_reserve_holds_as_many_chains_as_the_server_reckons() -> None:
    reserve = ChainReserve([a_group(a_layer(), a_layer()), a_group(a_layer())], 50 * BLOCK_BYTES, CPU)
    facts = DecodeFacts(
        refusal=None,
        rebuilt=False,
        reserve_bytes=reserve.nbytes,
        block_tokens=reserve.block_tokens,
        block_bytes=reserve.block_bytes,
        max_batch_nonces=16,
    )
    assert (facts["block_tokens"], facts["block_bytes"]) == ([BLOCK, BLOCK], [2 * BLOCK_BYTES, BLOCK_BYTES])
    assert chain_nonces(facts, 9) == 5, "each takes 3 blocks in 3 layers, and 3 more are left empty"
    reserve.cache(BatchShape(5, 9))
    with pytest.raises(ValueError, match=r"6 chains of 9 tokens take .* set aside: use fewer"):
        reserve.cache(BatchShape(6, 9))
    assert chain_nonces({**facts, "max_batch_nonces": 4}, 9) == 4
    assert chain_nonces(facts, 1000) == 0
    assert chain_nonces({**facts, "block_tokens": [], "block_bytes": []}, 9) == 0


def test_attention_that_keeps_states_is_refused() -> None:
    states: Any = SimpleNamespace(kv_cache=(torch.zeros(8, 2), torch.zeros(8, 3)))
    group = CacheGroup({"a": states}, builder=None, block_dim=0, block_size=BLOCK, page_bytes=0, stateful=True)
    with pytest.raises(UnsupportedModelError, match="keeps states"):
        ChainReserve([group], 4096, CPU)


def test_a_step_is_told_of_all_tokens_before_it_and_writes_behind_them() -> None:
    told: list[Any] = []

    def build(common_prefix_len: int, common_attn_metadata: Any) -> Any:  # noqa: ANN401
        told.append(common_attn_metadata)
        return SimpleNamespace()

    group = a_group(a_layer(), builder=SimpleNamespace(build=build))
    prefill, step = BatchShape(1, 3), BatchShape(2, 1)
    _, second = group.plan(prefill, prefill.positions(CPU), Placement(9, first=1))
    _, third = group.plan(step, step.positions(CPU, before=5), Placement(9, before=5))
    # Three blocks for each chain, from number 1 on.
    assert [told[0].block_table_tensor.tolist(), second.tolist()] == [[[4, 5, 6]], [16, 17, 18]]
    assert [told[1].block_table_tensor.tolist(), third.tolist()] == [[[1, 2, 3], [4, 5, 6]], [4 + 5, 16 + 5]]
    assert [common.seq_lens.tolist() for common in told] == [[3], [6, 6]]
    assert [common.max_seq_len for common in told] == [3, 6]
    assert [common.max_query_len for common in told] == [3, 1]
    assert [common.is_prefilling.tolist() for common in told] == [[True], [False, False]]
    assert told[1].positions.tolist() == [5, 5]
