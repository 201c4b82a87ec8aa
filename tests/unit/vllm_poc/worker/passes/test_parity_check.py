# SPDX-License-Identifier: Apache-2.0
"""Which pass is chosen by what the parity check of both gave; the GPU and the hidden states are made up."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

if TYPE_CHECKING:
    from torch import Tensor

ONES = torch.ones(4, 8)
CPU = torch.device("cpu")
LIMITS: Any = {"max_model_len": 4096, "max_batch_tokens": 8192, "max_batch_nonces": 256, "max_captured_tokens": 0}
ONE_RANK = SimpleNamespace(
    stages=1,
    stage=0,
    alone=True,
    receive=dict,
    in_step=lambda succeeded: succeeded,
    agreed=bool,
    has_first_layer=True,
    has_last_layer=True,
)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Runners with the plain pass and the fused one, and the hidden states of each."""
    from vllm_poc.worker import extension  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.memory import Memory  # noqa: PLC0415
    from vllm_poc.worker.passes import attention  # noqa: PLC0415

    adapter = SimpleNamespace(device=torch.device("cuda"), ranks=SimpleNamespace(agreed=bool), attention_layers={})
    plain = SimpleNamespace(stage=SimpleNamespace(adapter=adapter, limits=LIMITS))
    fused = SimpleNamespace(stage=object(), memory=Memory(torch.device("cpu")))
    ways = SimpleNamespace(
        plain=plain, fused=fused, expected=[ONES, ONES], found=[ONES, ONES], fastest=extension.fastest
    )
    monkeypatch.setattr(extension, "_with_fused_pass", lambda *_: fused)
    monkeypatch.setattr(extension, "hidden_states", lambda stage: ways.found if stage is fused.stage else ways.expected)
    monkeypatch.setattr(extension, "stands_alone", lambda _: False)
    monkeypatch.setattr(attention, "needs_no_cache", lambda _: True)
    return ways


@pytest.mark.parametrize("found", [[ONES, ONES], [ONES, 1.1 * ONES]])
def test_what_gives_the_same_is_chosen(ways: Any, found: list[Tensor]) -> None:  # noqa: ANN401 - a namespace
    ways.found = found
    assert ways.fastest(ways.plain) is ways.fused


@pytest.mark.parametrize("found", [[ONES, 2 * ONES], [ONES, torch.nan * ONES], [torch.nan * ONES, ONES], None])
def test_what_does_not_is_not(ways: Any, found: list[Tensor] | None) -> None:  # noqa: ANN401
    ways.found = found
    assert ways.fastest(ways.plain) is ways.plain


def test_attention_of_another_form_is_left_to_vllm(ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    from vllm_poc.worker.passes import attention  # noqa: PLC0415

    monkeypatch.delattr(attention, "needs_no_cache")
    assert ways.fastest(ways.plain) is ways.plain


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Takes and makes two streams, as a layer of GLM-5.3."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.of_its_kind = torch.nn.Parameter(torch.zeros(scale))
        self.hc_attn_fn = torch.zeros(1)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, None]:
        return self.scale * hidden, hidden if residual is None else residual + hidden, None


def a_stage(*scales: int) -> Any:  # noqa: ANN401
    """Return what computes small batches, on one rank, by these layers."""
    layers = torch.nn.ModuleList(Layer(scale) for scale in scales)
    stack = torch.nn.Module()
    stack.layers, stack.start_layer, stack.end_layer, stack._active_layers = layers, 0, len(layers), layers

    def forward(_spec: object, inputs: Tensor, _received: object, _nonces: int) -> Tensor:
        hidden, residual = inputs, None
        for layer in stack._active_layers:
            hidden, residual, _ = layer(hidden, residual)
        return hidden

    adapter = SimpleNamespace(
        model=torch.nn.Sequential(stack), stack=layers, own_layers=list(layers), ranks=ONE_RANK, device=CPU
    )
    parts = {"load": lambda *_: None, "inputs": lambda *_: torch.ones(4, 8), "forward": forward}
    return SimpleNamespace(adapter=adapter, limits=LIMITS, **parts)


def test_a_layer_is_compared_by_what_it_makes_of_the_same_input() -> None:
    from vllm_poc.worker.model.layer_subset import stands_alone  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.passes.parity_check import layer_differences, seen_layers  # noqa: PLC0415

    plain, fused = a_stage(2, 3, 5), a_stage(2, 4, 5)
    assert stands_alone(plain.adapter)
    seen = seen_layers(plain)
    assert seen is not None
    found = layer_differences(fused, seen)
    assert found == pytest.approx([0, 1 / 3, 0] * 2)
    assert layer_differences(plain, seen) == [0] * 6


def test_layers_are_not_compared_if_a_rank_failed() -> None:
    from vllm_poc.worker.passes.parity_check import layer_differences, seen_layers  # noqa: PLC0415 - needs vLLM

    plain, failing = a_stage(2, 3), a_stage(2, 3)
    failing.forward = None
    assert seen_layers(failing) is None
    seen = seen_layers(plain)
    assert seen is not None
    assert layer_differences(failing, seen) is None


BLOCK, WIDTH, HIDDEN = 16, 2, 8


def a_stage_that_writes(**limits: int) -> tuple[Any, list[tuple[int, int]]]:
    """Return PoC's own stage over a layer that writes each slot it is told, and the batches that came."""
    from vllm_poc.worker.model.adapter import ModelAdapter  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.scratch import CacheGroup  # noqa: PLC0415
    from vllm_poc.worker.model_runner import Stage  # noqa: PLC0415
    from vllm_poc.worker.passes.plain import PlainPass  # noqa: PLC0415

    layer: Any = SimpleNamespace(kv_cache=torch.zeros(64, BLOCK, WIDTH))
    builder: Any = SimpleNamespace(build=lambda **_: SimpleNamespace())
    group = CacheGroup({"layers.0.attn": layer}, builder, block_dim=0, block_size=BLOCK, page_bytes=0)
    batches: list[tuple[int, int]] = []

    layer.impl = SimpleNamespace(_k_scale_cache=torch.zeros(5), _workspace=torch.zeros(5))

    def forward(inputs: Any, _received: object, plan: Any) -> Tensor:  # noqa: ANN401
        batches.append(tuple(plan.shape))
        # Behind the end PyTorch raises; a kernel would go on writing.
        layer.kv_cache.view(-1, WIDTH)[plan.slot_mapping["layers.0.attn"]] = 1.0
        return inputs.embeddings.flatten(0, 1)

    adapter: Any = SimpleNamespace(
        groups=[group],
        attention_layers=group.layers,
        layers=[],
        own_layers=[],
        model=torch.nn.Module(),
        stack=None,
        device=CPU,
        dtype=torch.float32,
        vocabulary=None,
        reflects=False,
        ranks=ONE_RANK,
        _input_prep=nullcontext,
        forward=forward,
    )
    adapter.plan = lambda shape: ModelAdapter.plan(adapter, shape)
    facts: Any = {**LIMITS, "hidden_size": HIDDEN, **limits}
    return Stage(adapter, facts, PlainPass(adapter)), batches


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch_tokens": 256, "max_batch_nonces": 8},
        {"max_batch_tokens": 8, "max_batch_nonces": 2},
        {"max_batch_tokens": 1, "max_batch_nonces": 1},
        {"max_batch_nonces": 1},
        {"max_model_len": 48},
        {},
    ],
)
def test_small_batches_keep_within_the_servers_limits_and_its_scratch_cache(limits: dict[str, int]) -> None:
    from vllm_poc.worker.passes.parity_check import hidden_states  # noqa: PLC0415 - needs vLLM

    stage, batches = a_stage_that_writes(**limits)
    found = hidden_states(stage)
    assert found is not None
    assert len(found) == len(batches) >= 1
    for nonces, seq_len in batches:
        assert 1 <= nonces <= stage.limits["max_batch_nonces"]
        assert 1 <= seq_len <= stage.limits["max_model_len"]
        assert nonces * seq_len <= stage.limits["max_batch_tokens"]


def test_a_batch_beyond_the_scratch_cache_is_not_computed() -> None:
    from vllm_poc.rpc import PassSpec  # noqa: PLC0415 - needs vLLM
    from vllm_poc.wire.messages import Protocol  # noqa: PLC0415
    from vllm_poc.worker.model.adapter import StageInputs  # noqa: PLC0415

    stage, batches = a_stage_that_writes(max_batch_tokens=256, max_batch_nonces=8)
    spec = PassSpec(Protocol.ARTIFACT, seq_len=128, k_dim=1, strong_rng=False, layer_hooks=True, sign_flips=False)
    with pytest.raises(ValueError, match="4 x 128 tokens takes 33 blocks of the scratch KV cache, which has 25"):
        stage.forward(spec, StageInputs(torch.zeros(4, 128, HIDDEN), None), {}, 4)
    assert batches == []


def test_a_pass_that_leaves_chats_memory_alone_is_used() -> None:
    from vllm_poc.worker.extension import harmless  # noqa: PLC0415 - needs vLLM

    stage, batches = a_stage_that_writes()
    runner: Any = SimpleNamespace(stage=stage)
    (layer,) = stage.adapter.attention_layers.values()
    own = layer.kv_cache
    _then(stage.adapter, lambda: layer.impl._workspace.add_(1.0))
    assert harmless(runner) is runner
    assert batches, "it has run"
    assert layer.kv_cache is own
    assert not own.any()


@pytest.mark.parametrize("place", ["kv_cache", "scales"])
def test_a_pass_that_writes_into_chats_memory_is_refused(place: str) -> None:
    from vllm_poc.worker.extension import harmless  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.scratch import UnsupportedModelError  # noqa: PLC0415

    stage, _ = a_stage_that_writes()
    (layer,) = stage.adapter.attention_layers.values()
    memory = {"kv_cache": layer.kv_cache, "scales": layer.impl._k_scale_cache}[place]
    _then(stage.adapter, lambda: memory.flatten()[-1:].add_(2.0**-20))
    with pytest.raises(UnsupportedModelError, match="changes chat's KV cache here: restart vLLM"):
        harmless(SimpleNamespace(stage=stage))  # type: ignore[arg-type]


def _then(adapter: Any, do: Any) -> None:  # noqa: ANN401
    forward = adapter.forward

    def both(*arguments: Any) -> Tensor:  # noqa: ANN401
        do()
        return forward(*arguments)

    adapter.forward = both
