# SPDX-License-Identifier: Apache-2.0
"""Which attention the fused pass replaces, which it leaves to the server, and what it keeps for that."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

FACTS: Any = {"max_model_len": 4096, "max_batch_tokens": 8192, "max_batch_nonces": 256}
ONE, PER_HEAD = torch.ones(1), torch.ones(8)


def layer(dtype: str, **changed: Any) -> Any:  # noqa: ANN401 - stands for vLLM's layer
    """FlashAttention is for CUDA alone."""
    fields = {"attn_type": "decoder", "kv_cache_dtype": dtype} | changed
    impl = type(changed.get("named", "FlashAttentionImpl"), (), fields)()
    quantised = None if dtype in {"auto", "bfloat16", "float16"} else object()
    kind = type(changed.get("kind", "Attention"), (SimpleNamespace,), {})
    return kind(impl=impl, query_quant=quantised, _k_scale=ONE, _v_scale=changed.get("scale", ONE))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([layer("auto"), layer("bfloat16")], (True, False)),
        ([layer("fp8"), layer("fp8_e4m3")], (False, True)),
        ([layer("fp8"), layer("auto")], (False, True)),
        ([layer("fp8"), layer("fp8", scale=PER_HEAD)], (False, False)),
        ([layer("fp8_e5m2")], (False, False)),
        ([layer("fp8", named="FlashInferImpl")], (False, False)),
        ([layer("auto"), layer("auto", named="TritonAttentionImpl")], (False, False)),
        ([layer("fp8", attn_type="encoder_only")], (False, False)),
        ([layer("auto"), layer("auto", kind="ChunkedLocalAttention")], (False, False)),
        ([], (False, False)),
    ],
)
def test_what_becomes_of_attention(layers: list[Any], expected: tuple[bool, bool]) -> None:
    from vllm_poc.worker.passes.attention import needs_no_cache, rounds_in_cache  # noqa: PLC0415 - needs vLLM

    assert (needs_no_cache(layers), rounds_in_cache(layers)) == expected


def test_a_plan_is_made_once_for_a_shape_and_kept_as_long_as_graphs_are() -> None:
    from vllm_poc.worker.model.scratch import BatchShape  # noqa: PLC0415
    from vllm_poc.worker.passes.attention import MAX_PLANS, CachedPlans  # noqa: PLC0415 - needs vLLM

    runner: Any = SimpleNamespace(plan=lambda shape: [shape])
    plans: Any = CachedPlans(runner)
    first, *others = (BatchShape(nonces, 64) for nonces in range(1, MAX_PLANS + 2))
    made = plans[first]
    for shape in others[:-1]:
        assert plans[shape] == [shape]
        assert plans[first] is made
    assert len(plans.kept()) == MAX_PLANS
    assert plans[others[-1]] is not made
    assert plans[first] is made, "what was used last stays"
    assert len(plans.kept()) == MAX_PLANS
    assert [others[0]] not in plans.kept()


@dataclasses.dataclass
class Metadata:
    """What FlashAttention's builder returns, in part."""

    table: Any
    scheduler_metadata: Any


class OnGpu(torch.Tensor):  # type: ignore[misc, name-defined]
    """Says that it lies on a GPU."""

    is_cuda = True


class Builder:
    """Fills one buffer for all of its batches, as FlashAttention's does for CUDA graphs."""

    def __init__(self, buffer: Any) -> None:  # noqa: ANN401 - a tensor
        self._buffer = buffer

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Metadata:  # noqa: ANN401
        self._buffer.fill_(common_attn_metadata.num_reqs)
        return Metadata(common_attn_metadata.block_table_tensor, self._buffer)


def test_a_plan_outlives_the_next_batch() -> None:
    from vllm_poc.worker.model.scratch import BatchShape, CacheGroup  # noqa: PLC0415 - needs vLLM

    buffer = torch.zeros(4).as_subclass(OnGpu)
    group = CacheGroup(layers={}, builder=Builder(buffer), block_dim=0, block_size=16, page_bytes=0)
    plans = [group.plan(BatchShape(nonces, 8), torch.arange(8).repeat(nonces)) for nonces in (2, 3)]
    assert [metadata.scheduler_metadata.tolist() for metadata, _ in plans] == [[2.0] * 4, [3.0] * 4]
    assert [len(slots) for _, slots in plans] == [16, 24]


@dataclasses.dataclass
class Prompts:
    """Metadata of latent attention's prompts, in part."""

    starts: Any
    prefill_backend: Any


class PrefillBackend:
    """Keeps the metadata of the batch to compute, as vLLM's of latent attention does."""

    told: Any = None

    def prepare_metadata(self, prompts: Prompts) -> None:
        self.told = prompts


class PromptBuilder:
    """Has one such object for all of its batches."""

    def __init__(self) -> None:
        self._backend = PrefillBackend()

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Metadata:  # noqa: ANN401
        prompts = Prompts(common_attn_metadata.query_start_loc, self._backend)
        self._backend.prepare_metadata(prompts)
        return Metadata(None, prompts)


def test_a_plan_of_prompts_outlives_the_next_batch() -> None:
    from vllm_poc.worker.model.scratch import BatchShape, CacheGroup  # noqa: PLC0415 - needs vLLM

    group = CacheGroup(layers={}, builder=PromptBuilder(), block_dim=0, block_size=16, page_bytes=0)
    plans = [group.plan(BatchShape(nonces, 8), torch.arange(8).repeat(nonces)) for nonces in (2, 3)]
    backends = [metadata.scheduler_metadata.prefill_backend for metadata, _ in plans]
    assert [backend.told.starts.tolist() for backend in backends] == [[0, 8, 16], [0, 8, 16, 24]]


def test_a_schedule_on_a_cpu_is_left_as_it_is() -> None:
    """The CPU backend's holds addresses of its own memory: a copy would point elsewhere."""
    from vllm_poc.worker.model.scratch import BatchShape, CacheGroup  # noqa: PLC0415 - needs vLLM

    buffer = torch.zeros(4)
    group = CacheGroup(layers={}, builder=Builder(buffer), block_dim=0, block_size=16, page_bytes=0)
    metadata, _ = group.plan(BatchShape(2, 8), torch.arange(8).repeat(2))
    assert metadata.scheduler_metadata is buffer


def test_a_pass_with_a_cache_has_no_more_sequences_than_vllms() -> None:
    from vllm_poc.worker.model.capabilities import fused_facts  # noqa: PLC0415
    from vllm_poc.worker.model.scratch import BatchShape  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model_runner import check_shape  # noqa: PLC0415

    cached, plain = (fused_facts(FACTS, experts=True, cached=cached) for cached in (True, False))
    for facts in (cached, plain):
        check_shape(BatchShape(256, 128), facts)
        with pytest.raises(ValueError, match="32768 tokens"):
            check_shape(BatchShape(256, 129), facts)
    check_shape(BatchShape(257, 1), plain)
    with pytest.raises(ValueError, match=r"1\.\.256 nonces"):
        check_shape(BatchShape(257, 1), cached)
