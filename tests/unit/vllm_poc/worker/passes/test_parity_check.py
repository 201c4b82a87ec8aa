# SPDX-License-Identifier: Apache-2.0
"""Which pass is chosen by what the parity check of both gave; the GPU and the hidden states are made up."""

from __future__ import annotations

import math
import re
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
    all_fit=lambda error: error is None,
    has_first_layer=True,
    has_last_layer=True,
)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Runners with the plain pass and the fused one, and how far they are apart."""
    from vllm_poc.worker import extension  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.memory import Memory  # noqa: PLC0415
    from vllm_poc.worker.passes import attention  # noqa: PLC0415
    from vllm_poc.worker.passes.parity_check import Comparison  # noqa: PLC0415

    adapter = SimpleNamespace(
        device=torch.device("cuda"),
        ranks=SimpleNamespace(agreed=bool),
        attention_layers={},
        own_layers=[],
        borders=(),
        dtype=torch.bfloat16,
        is_quantised=False,
    )
    plain = SimpleNamespace(stage=SimpleNamespace(adapter=adapter, limits=LIMITS), findings=[], slower=None)
    fused = SimpleNamespace(stage=object(), memory=Memory(torch.device("cpu")), findings=[])
    ways = SimpleNamespace(
        plain=plain,
        fused=fused,
        model=0.0,
        attention=0.0,
        fails=False,
        found=[],
        fastest=extension.fastest,
        compared=[],
    )

    def compare(_plain: object, _fused: object, shape: tuple[int, int], *_: object) -> Comparison | None:
        ways.compared.append(shape)
        return None if ways.fails else Comparison([ways.model], [], [ways.attention])

    monkeypatch.setattr(extension, "_with_fused_pass", lambda *_: fused)
    monkeypatch.setattr(extension, "compare", compare)
    monkeypatch.setattr(extension, "hidden_states", lambda *_: ways.found)
    monkeypatch.setattr(attention, "needs_no_cache", lambda _: True)
    return ways


@pytest.mark.parametrize("apart", [{}, {"model": 0.15}, {"attention": 0.03}])
def test_what_gives_the_same_is_chosen(ways: Any, apart: dict[str, float]) -> None:  # noqa: ANN401 - a namespace
    vars(ways).update(apart)
    assert ways.fastest(ways.plain) is ways.fused
    assert ways.fused.findings == [
        "PoC computes with fused operations: in batches of 4 x 64, 4 x 128 tokens they gave what vLLM's own gave."
    ]


NAN = float("nan")


@pytest.mark.parametrize("apart", [{"model": 0.3}, {"model": NAN}, {"attention": 0.1}, {"attention": NAN}])
def test_what_does_not_is_not(ways: Any, apart: dict[str, float]) -> None:  # noqa: ANN401
    vars(ways).update(apart)
    assert ways.fastest(ways.plain) is ways.plain
    assert len(ways.compared) == 1
    (finding,) = ways.plain.findings
    assert "slower, since a batch of 4 x 64 tokens is further from vLLM's own than rounding makes it" in finding


def test_what_fails_is_not_chosen(ways: Any) -> None:  # noqa: ANN401
    ways.fails = True
    assert ways.fastest(ways.plain) is ways.plain
    assert "a batch of 4 x 64 tokens fails with fused ones, and the worker's log says how" in ways.plain.findings[0]


def test_what_fails_before_it_is_compared_is_not_chosen(ways: Any) -> None:  # noqa: ANN401
    ways.found = None
    assert ways.fastest(ways.plain) is ways.plain
    assert "a small batch fails with fused ones, and the worker's log says how" in ways.plain.findings[0]
    assert ways.compared == []


def test_what_was_not_compared_in_time_is_not_chosen(ways: Any) -> None:  # noqa: ANN401
    from vllm_poc.worker.passes.parity_check import Deadline  # noqa: PLC0415 - needs vLLM

    assert ways.fastest(ways.plain, Deadline(-1.0)) is ways.plain
    assert "a batch of 4 x 64 tokens was not compared within -1 s; it is tried again." in ways.plain.findings[0]
    assert ways.compared == []


def test_kernels_may_take_several_looks_to_compile(ways: Any) -> None:  # noqa: ANN401
    from vllm_poc.worker.passes.parity_check import Deadline  # noqa: PLC0415 - needs vLLM

    tried_again = []
    for _ in range(5):
        assert ways.fastest(ways.plain, Deadline(-1.0)) is ways.plain
        tried_again.append(ways.plain.slower.passes)
    assert tried_again == [True] * 4 + [False], "it is slow, also without compiling"
    assert ways.fastest(ways.plain) is ways.fused


def test_one_that_finds_no_memory_is_tried_again_as_often_as_it_takes(
    ways: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_poc.worker import extension  # noqa: PLC0415 - needs vLLM

    def lacks_memory(*_: object) -> None:
        raise MemoryError("no room")

    for part in ("_with_fused_pass", "hidden_states", "compare"):
        with monkeypatch.context() as patch:
            patch.setattr(extension, part, lacks_memory)
            for _ in range(3):
                assert ways.fastest(ways.plain) is ways.plain
                assert ways.plain.slower.passes
        assert (
            "slower, since fused ones find no room in the GPU's memory; it is tried again." in ways.plain.findings[-1]
        )
        assert ways.fastest(ways.plain) is ways.fused


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("no kernel")])
def test_fused_operations_that_cannot_be_prepared_are_told_apart(error: Exception) -> None:
    from unittest.mock import patch  # noqa: PLC0415

    from vllm_poc.worker import extension  # noqa: PLC0415 - needs vLLM

    adapter: Any = SimpleNamespace(ranks=ONE_RANK)
    plain: Any = SimpleNamespace()
    with patch.object(extension, "_prepared_fused_pass", lambda *_: (None, error)):
        if isinstance(error, torch.OutOfMemoryError):
            with pytest.raises(MemoryError):
                extension._with_fused_pass(adapter, plain)
        else:
            assert extension._with_fused_pass(adapter, plain) is None


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


def shared(stage: Any, *scales: int) -> Any:  # noqa: ANN401
    """Return a stage that computes by the same layers, which meanwhile have other scales, as a pass patches them."""
    own = [layer.scale for layer in stage.adapter.own_layers]
    forward = stage.forward

    def patched(*arguments: Any) -> Tensor:  # noqa: ANN401
        try:
            for layer, scale in zip(stage.adapter.own_layers, scales, strict=True):
                layer.scale = scale
            return forward(*arguments)
        finally:
            for layer, scale in zip(stage.adapter.own_layers, own, strict=True):
                layer.scale = scale

    return SimpleNamespace(**{**vars(stage), "forward": patched})


def compared(plain: Any, fused: Any, seq_len: int = 64) -> Any:  # noqa: ANN401
    from vllm_poc.worker.model.scratch import BatchShape  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.passes.parity_check import _output, compare  # noqa: PLC0415

    shape = BatchShape(2, seq_len)
    found: Any = _output(fused, shape, {})
    return compare(plain, fused, shape, found)


def test_a_layer_is_compared_by_what_it_makes_of_the_same_input() -> None:
    plain = a_stage(2, 3, 5)
    assert compared(plain, shared(plain, 2, 4, 5)).layers == pytest.approx([0, 1 / 3, 0])
    assert compared(plain, plain).layers == [0] * 3


def test_what_modules_make_in_a_dry_run_does_not_count() -> None:
    """Other ranks have added nothing there, so a layer that is right makes something else."""
    plain = a_stage(2, 3, 5)
    plain.adapter.ranks = SimpleNamespace(**{**vars(ONE_RANK), "alone": False})
    runs = []

    def dry_run(spec: Any, _: Tensor) -> None:  # noqa: ANN401
        if spec not in runs:  # as a stage does, which runs each size once
            runs.append(spec)
            shared(plain, 7, 7, 7).forward(spec, torch.ones(4, 8), {}, 2)

    plain.dry_run = lambda *_: None
    fused = SimpleNamespace(**{**vars(plain), "dry_run": dry_run})
    assert compared(plain, fused).layers == [0] * 3
    assert len(runs) == 1


def test_passes_are_not_compared_if_a_rank_failed() -> None:
    plain, failing = a_stage(2, 3), a_stage(2, 3)
    failing.forward = None
    assert compared(failing, plain) is None
    assert compared(plain, failing) is None


class WindowedAttention(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Attention with equal weights over the tokens of a window, and what patches may set: whether it has one."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.impl = SimpleNamespace(sliding_window=window)
        self.window: int | None = window

    def forward(self, values: Tensor) -> Tensor:
        tokens = torch.arange(len(values))
        seen = tokens[:, None] >= tokens
        if self.window is not None:
            seen &= tokens[:, None] - tokens < self.window
        return (seen / seen.sum(dim=1, keepdim=True)) @ values


WINDOW = 300
#: How much of the output is attention's: little, as behind a large residual.
SHARE = 0.01


def a_windowed_stage(**limits: int) -> Any:  # noqa: ANN401
    """Return a stage of one sequence with such attention behind a residual."""
    attention = WindowedAttention(WINDOW)

    def forward(spec: Any, _inputs: object, _received: object, _nonces: int) -> Tensor:  # noqa: ANN401
        values = torch.randn(spec.seq_len, 64, generator=torch.Generator().manual_seed(spec.seq_len))
        return (values + SHARE * attention(values))[-1:]

    adapter = SimpleNamespace(
        model=torch.nn.Module(),
        stack=None,
        own_layers=[],
        attention_modules=[attention],
        ranks=ONE_RANK,
        device=CPU,
        borders={WINDOW},
        dtype=torch.bfloat16,
        is_quantised=False,
    )
    parts = {"load": lambda *_: None, "inputs": lambda *_: None, "forward": forward}
    return SimpleNamespace(adapter=adapter, limits={**LIMITS, **limits}, attention=attention, **parts)


def without_window(plain: Any) -> Any:  # noqa: ANN401
    """Return the same stage with a pass that forgets the window."""

    def forward(*arguments: Any) -> Tensor:  # noqa: ANN401
        plain.attention.window = None
        try:
            return plain.forward(*arguments)
        finally:
            plain.attention.window = WINDOW

    return SimpleNamespace(**{**vars(plain), "forward": forward})


def test_a_pass_that_is_wrong_only_beyond_the_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_poc.worker import extension  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.memory import Memory  # noqa: PLC0415
    from vllm_poc.worker.passes.parity_check import Tolerances  # noqa: PLC0415

    stage = a_windowed_stage()
    wrong = without_window(stage)
    tolerances = Tolerances.of(torch.bfloat16, quantised=False)
    for seq_len in (64, 128, WINDOW):
        assert compared(stage, wrong, seq_len).is_equal(tolerances), "up to the window it is right"
    beyond = compared(stage, wrong, 2 * WINDOW + 1)
    assert not beyond.is_equal(tolerances)
    assert beyond.model[0] <= tolerances.model, "behind the residual it hardly shows"

    monkeypatch.setattr(extension, "_may_fuse", lambda _: True)
    runners = [SimpleNamespace(stage=found, findings=[], slower=None, memory=Memory(CPU)) for found in (stage, wrong)]
    plain, fused = runners
    monkeypatch.setattr(extension, "_with_fused_pass", lambda *_: fused)
    assert extension.fastest(plain) is plain  # type: ignore[arg-type, comparison-overlap]
    assert f"a batch of 3 x {2 * WINDOW + 1} tokens is further from vLLM's own" in plain.findings[0]
    fused.stage = stage
    assert extension.fastest(plain) is fused  # type: ignore[arg-type, comparison-overlap]


def test_attention_that_a_pass_goes_around_does_not_count_as_equal() -> None:
    from vllm_poc.worker.passes.parity_check import Tolerances  # noqa: PLC0415 - needs vLLM

    stage = a_windowed_stage()
    around = SimpleNamespace(**{**vars(stage), "forward": lambda *_: torch.zeros(1, 64)})
    assert not compared(stage, around).is_equal(Tolerances(10.0, 10.0))


@pytest.mark.parametrize(
    ("away", "equal"),
    [
        ([0.18, 0.18, 0.18, 0.18], True),
        ([0.02, 0.4, 0.02, 0.02], True),
        ([0.02, 0.4, 0.02], True),
        ([0.02, 0.4, 0.4], False),
        ([0.02, 0.4], False),
        ([0.02, 0.2], True),
        ([0.02, 0.02, 0.4, 0.4], False),
        ([0.02, 0.02, 1.0, 0.02], False),
        ([0.02, 1.0], False),
        ([0.25, 0.25, 0.25, 0.25], False),
        ([0.02, math.nan, 0.02, 0.02], False),
    ],
)
def test_one_sequence_may_be_at_other_experts(away: list[float], equal: bool) -> None:
    """Where layers mix streams and there are at least three: one, and not as far as one that is wrong."""
    from vllm_poc.worker.passes.parity_check import Comparison, Tolerances, differences_but_one  # noqa: PLC0415

    expected = torch.ones(len(away), 4, 16)
    distances = differences_but_one([expected + torch.tensor(away)[:, None, None]], [expected])
    assert Comparison(distances, [], []).is_equal(Tolerances.of(torch.bfloat16, quantised=True)) is equal


def test_other_experts_explain_neither_attention_nor_what_is_no_number() -> None:
    from vllm_poc.worker.passes.parity_check import Comparison, Tolerances  # noqa: PLC0415 - needs vLLM

    tolerances = Tolerances.of(torch.bfloat16, quantised=True)
    assert Comparison([0.3], [], [0.01]).may_be_chance(tolerances)
    for model, attention in ((0.3, 0.1), (0.3, NAN), (NAN, 0.01), (math.inf, 0.01)):
        assert not Comparison([model], [], [attention]).may_be_chance(tolerances)


class WithStreams(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A layer that mixes streams, and reads more than its arguments."""

    hc_attn_fn = torch.zeros(1)


@pytest.mark.parametrize(
    ("layers", "apart", "equal", "tries"),
    [
        ([WithStreams()], [[0.01, 0.4, 0.01, 0.01]], True, 1),
        ([WithStreams()], [[0.01, 0.4, 0.4, 0.01], [0.01] * 4], True, 2),
        ([WithStreams()], [[0.4, 0.4, 0.4, 0.01], [0.4, 0.4, 0.01, 0.01], [0.4] * 4, [0.01] * 4], True, 4),
        ([WithStreams()], [[0.01, 0.4, 0.4, 0.01]] * 4, False, 4),
        ([WithStreams()], [[0.5] * 4] * 4, False, 4),
        ([torch.nn.Module()], [[0.5] * 4, [0.01] * 4], False, 1),
    ],
)
def test_batches_with_other_nonces_tell_other_experts_from_what_is_wrong(
    layers: list[Any], apart: list[list[float]], equal: bool, tries: int
) -> None:
    """Two of four sequences may be at other experts by chance, and those of a wrong pass are each time."""
    from vllm_poc.worker.extension import _difference  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.scratch import BatchShape  # noqa: PLC0415
    from vllm_poc.worker.passes.parity_check import Deadline, _output  # noqa: PLC0415

    batches: list[Tensor] = []

    def inputs(_: object, seeds: Tensor) -> Tensor:
        if not any(torch.equal(seeds, other) for other in batches):
            batches.append(seeds)
        return seeds

    def stage(scale: float) -> Any:  # noqa: ANN401
        def forward(_spec: object, seeds: Tensor, _received: object, _nonces: int) -> Tensor:
            (number,) = (at for at, other in enumerate(batches) if torch.equal(seeds, other))
            away = torch.tensor(apart[number])[:, None]
            return (1 + scale * away) * torch.ones(4, 16)

        parts = {"load": lambda *_: None, "inputs": inputs, "forward": forward}
        return SimpleNamespace(adapter=adapter, limits=LIMITS, **parts)

    adapter = SimpleNamespace(
        model=torch.nn.Module(),
        stack=None,
        own_layers=layers,
        attention_modules=[],
        ranks=ONE_RANK,
        device=CPU,
        dtype=torch.bfloat16,
        is_quantised=True,
    )
    plain, fused, shape = stage(0.0), stage(1.0), BatchShape(4, 64)
    found: Any = _output(fused, shape, {})
    difference = _difference(fused, plain, shape, found, Deadline())
    assert (difference is None) is equal
    assert difference is None or "a batch of 4 x 64 tokens is further from vLLM's own" in difference
    assert len(batches) == tries


@pytest.mark.parametrize(
    ("borders", "limits", "expected"),
    [
        ((), {}, [(4, 64), (4, 128)]),
        ((16, 1024), {}, [(4, 33), (4, 64), (4, 128), (3, 2049)]),
        ((1024,), {"max_model_len": 1500}, [(4, 64), (4, 128), (3, 1500)]),
        ((1024,), {"max_batch_tokens": 2048}, [(4, 64), (4, 128), (1, 2048)]),
        ((8192,), {}, [(4, 64), (4, 128), (2, 4096)]),
    ],
)
def test_lengths_go_beyond_each_border_within_the_limits(
    borders: tuple[int, ...], limits: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    from vllm_poc.worker.passes.parity_check import parity_batches  # noqa: PLC0415 - needs vLLM

    found: Any = {**LIMITS, **limits}
    assert parity_batches(found, borders) == expected


@pytest.mark.parametrize(
    ("dtype", "quantised", "model"),
    [("bfloat16", False, 0.203), ("float16", False, 0.0254), ("float16", True, 0.203), ("float32", False, 0.0254)],
)
def test_tolerances_follow_from_the_dtype(dtype: str, quantised: bool, model: float) -> None:
    from vllm_poc.worker.passes.parity_check import Tolerances  # noqa: PLC0415 - needs vLLM

    found = Tolerances.of(getattr(torch, dtype), quantised=quantised)
    assert found == pytest.approx((model, model * 8 / 26), rel=0.01)


def test_batches_end_when_their_time_is_over() -> None:
    from vllm_poc.worker.passes.parity_check import SECONDS, Deadline, hidden_states  # noqa: PLC0415 - needs vLLM

    stage, batches = a_stage_that_writes()
    now = iter([0.0, SECONDS + 1.0])
    found = hidden_states(stage, Deadline(clock=lambda: next(now)))
    assert found is not None
    assert len(found) == len(batches) == 1


@pytest.mark.parametrize("seconds_per_batch", [0.5, 3.0, 7.0, 20.0])
def test_a_whole_look_has_one_deadline(seconds_per_batch: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it consists of: the call in which it is made has a limit, too."""
    from vllm_poc.worker import extension  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.memory import Memory  # noqa: PLC0415
    from vllm_poc.worker.passes.parity_check import Deadline  # noqa: PLC0415

    stage, batches = a_stage_that_writes()
    plain, fused = (SimpleNamespace(stage=stage, findings=[], slower=None, memory=Memory(CPU)) for _ in range(2))
    monkeypatch.setattr(extension, "_may_fuse", lambda _: True)
    monkeypatch.setattr(extension, "_with_fused_pass", lambda *_: fused)
    deadline = Deadline(10.0, lambda: seconds_per_batch * len(batches))
    runner = extension.harmless(plain, deadline)  # type: ignore[arg-type]
    assert seconds_per_batch * (len(batches) - 2) <= 10.0, "no batch is begun, nor one compared by two passes"
    assert (runner is fused) is (seconds_per_batch == 0.5)  # type: ignore[comparison-overlap]


def test_what_there_was_no_time_for_is_said() -> None:
    from vllm_poc.worker.extension import harmless  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.passes.parity_check import Deadline  # noqa: PLC0415

    stage, batches = a_stage_that_writes()
    runner: Any = SimpleNamespace(stage=stage, findings=[], slower=None)
    assert harmless(runner, Deadline(10.0, lambda: 11.0 * len(batches))) is runner
    assert runner.findings[-2:] == [
        "PoC left chat's KV cache and what attention holds as they were, in batches of 4 x 33 tokens.",
        "There was no time for batches of 4 x 64, 4 x 128 tokens.",
    ]


def test_a_lack_of_memory_is_no_harm() -> None:
    from vllm_poc.worker.extension import harmless  # noqa: PLC0415 - needs vLLM

    stage, _ = a_stage_that_writes()
    runner: Any = SimpleNamespace(stage=stage, findings=[], slower=None)
    forward, errors = stage.adapter.forward, [torch.OutOfMemoryError("no room")]

    def short_of_memory(*arguments: Any) -> Tensor:  # noqa: ANN401
        if errors:
            raise errors.pop()
        return forward(*arguments)

    stage.adapter.forward = short_of_memory
    with pytest.raises(MemoryError, match="the GPU has no room for PoC's small batches: start vLLM with a lower"):
        harmless(runner)
    assert harmless(runner) is runner


BLOCK, WIDTH, HIDDEN = 16, 2, 8


def a_stage_that_writes(**limits: int) -> tuple[Any, list[tuple[int, int]]]:
    """Return PoC's own stage over a layer that writes each slot it is told, and the batches that came."""
    from vllm_poc.worker.model.adapter import ModelAdapter  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.scratch import CacheGroup  # noqa: PLC0415
    from vllm_poc.worker.model_runner import Stage  # noqa: PLC0415
    from vllm_poc.worker.passes.plain import PlainPass  # noqa: PLC0415

    layer: Any = SimpleNamespace(kv_cache=torch.zeros(64, BLOCK, WIDTH))
    builder: Any = SimpleNamespace(
        build=lambda **_: SimpleNamespace(),
        max_model_len_tensor=torch.full((3,), 7),
        arange_buffer=torch.arange(5),
        decode_lens_buffer=torch.zeros(5),
    )
    group = CacheGroup({"layers.0.attn": layer}, builder, block_dim=0, block_size=BLOCK, page_bytes=0)
    batches: list[tuple[int, int]] = []

    layer.impl = SimpleNamespace(
        _k_scale_cache=torch.zeros(5), _workspace=torch.zeros(5), views=[torch.zeros(5)], sliding_window=-1
    )
    drafter: Any = SimpleNamespace(kv_cache=torch.zeros(4))

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
        is_quantised=False,
        attention_modules=[],
        ranks=ONE_RANK,
        positions=lambda shape, before=0: shape.positions(CPU, before),
        borders=frozenset({BLOCK}),
        _input_prep=nullcontext,
        forward=forward,
    )
    adapter.plan = lambda shape: ModelAdapter.plan(adapter, shape)
    context = {**group.layers, "draft.attn": drafter, "experts": object()}
    adapter._config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    adapter.chat_memory = ModelAdapter.chat_memory.fget(adapter)  # type: ignore[attr-defined]
    facts: Any = {**LIMITS, "hidden_size": HIDDEN, **limits}
    stage: Any = Stage(adapter, facts, PlainPass(adapter))
    stage.drafter = drafter
    return stage, batches


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
    runner: Any = SimpleNamespace(stage=stage, findings=[], slower=None)
    (layer,) = stage.adapter.attention_layers.values()
    own = layer.kv_cache
    builder = stage.adapter.groups[0].builder
    _then(stage.adapter, lambda: (layer.impl._workspace.add_(1.0), builder.decode_lens_buffer.add_(1.0)))
    assert harmless(runner) is runner
    assert batches, "it has run"
    assert layer.kv_cache is own
    assert not own.any()


#: What chat reads again, by its name in the refusal.
KEPT: dict[str, Any] = {
    "attn kv_cache": lambda layer, _: layer.kv_cache,
    "attn impl._k_scale_cache": lambda layer, _: layer.impl._k_scale_cache,
    "attn impl.views.0": lambda layer, _: layer.impl.views[0],
    "attn builder.max_model_len_tensor": lambda _, builder: builder.max_model_len_tensor,
    "attn builder.arange_buffer": lambda _, builder: builder.arange_buffer,
}


@pytest.mark.parametrize("name", KEPT)
def test_a_pass_that_writes_into_chats_memory_is_refused(name: str) -> None:
    from vllm_poc.worker.extension import harmless  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.scratch import UnsupportedModelError  # noqa: PLC0415

    stage, _ = a_stage_that_writes()
    (layer,) = stage.adapter.attention_layers.values()
    memory = KEPT[name](layer, stage.adapter.groups[0].builder)
    _then(stage.adapter, lambda: memory.flatten()[-1:].add_(1))
    with pytest.raises(UnsupportedModelError, match=rf"holds here \(layers.0.{re.escape(name)}\): restart vLLM"):
        harmless(SimpleNamespace(stage=stage, findings=[], slower=None))  # type: ignore[arg-type]


def test_a_pass_that_writes_into_the_cache_of_a_layer_that_is_none_of_its_own_is_refused() -> None:
    """As of a model that only drafts for speculative decoding."""
    from vllm_poc.worker.extension import harmless  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.scratch import UnsupportedModelError  # noqa: PLC0415

    stage, _ = a_stage_that_writes()
    _then(stage.adapter, lambda: stage.drafter.kv_cache.add_(1))
    with pytest.raises(UnsupportedModelError, match=r"\(draft.attn kv_cache\)"):
        harmless(SimpleNamespace(stage=stage, findings=[], slower=None))  # type: ignore[arg-type]


def test_words_that_change_places_show() -> None:
    from vllm_poc.worker.extension import harmless  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.scratch import UnsupportedModelError  # noqa: PLC0415

    stage, _ = a_stage_that_writes()
    (layer,) = stage.adapter.attention_layers.values()
    layer.kv_cache.view(-1)[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    own = layer.kv_cache
    _then(stage.adapter, lambda: own.view(-1)[:4].copy_(torch.tensor([3.0, 4.0, 1.0, 2.0])))
    with pytest.raises(UnsupportedModelError, match="attn kv_cache"):
        harmless(SimpleNamespace(stage=stage, findings=[], slower=None))  # type: ignore[arg-type]


def test_a_builders_tensor_that_moves_is_refused() -> None:
    """CUDA graphs of chat read it where it was."""
    from vllm_poc.worker.extension import harmless  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.scratch import UnsupportedModelError  # noqa: PLC0415

    stage, _ = a_stage_that_writes()
    builder = stage.adapter.groups[0].builder
    places = [builder.decode_lens_buffer]  # kept, or the second pass may move it back into memory that the first freed

    def move() -> None:
        places.append(places[-1].clone())
        builder.decode_lens_buffer = places[-1]

    _then(stage.adapter, move)
    with pytest.raises(UnsupportedModelError, match=r"builder\.decode_lens_buffer"):
        harmless(SimpleNamespace(stage=stage, findings=[], slower=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "refused"), [("_late", True), ("_own", False)])
def test_a_view_of_the_scratch_cache_that_attention_keeps_is_refused(name: str, refused: bool) -> None:
    from vllm_poc.worker.extension import harmless  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.model.scratch import UnsupportedModelError  # noqa: PLC0415

    stage, _ = a_stage_that_writes()
    (layer,) = stage.adapter.attention_layers.values()
    made = {"_late": lambda: layer.kv_cache[1:2], "_own": lambda: torch.zeros(3)}
    _then(stage.adapter, lambda: setattr(layer.impl, name, made[name]()))
    runner: Any = SimpleNamespace(stage=stage, findings=[], slower=None)
    if not refused:
        assert harmless(runner) is runner
        return
    with pytest.raises(UnsupportedModelError, match=r"\(layers.0.attn impl._late\)"):
        harmless(runner)


def _then(adapter: Any, do: Any) -> None:  # noqa: ANN401
    forward = adapter.forward

    def both(*arguments: Any) -> Tensor:  # noqa: ANN401
        do()
        return forward(*arguments)

    adapter.forward = both


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError("no room"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_a_lack_of_memory_is_told_apart_from_what_is_wrong(error: Exception | None, lacks: bool) -> None:
    from vllm_poc.worker.model.ranks import lacks_memory  # noqa: PLC0415 - needs vLLM

    assert lacks_memory(error) is lacks
