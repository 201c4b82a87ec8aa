# SPDX-License-Identifier: Apache-2.0
"""Which layers a warm-up runs, and that it leaves the model as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

from torch import nn  # noqa: E402

from vllm_poc.worker.model.layer_subset import comparable, only, spans  # noqa: E402

DENSE, EXPERTS = 4, 8


class Stack(nn.Module):  # type: ignore[misc]
    """Walks through its layers as vLLM's models do."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width) for width in widths])
        self.start_layer, self.end_layer = 1, 1 + len(widths)  # the first layer is another stage's


def runner(*widths: int) -> Any:  # noqa: ANN401
    stack = Stack(*widths)
    return SimpleNamespace(model=nn.Sequential(stack), stack=stack.layers, own_layers=list(stack.layers))


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([DENSE] * 3, [range(3)]),
        ([DENSE] * 30, [range(26, 30)]),
        ([DENSE, EXPERTS] * 10, [range(16, 20)]),
        ([DENSE] + [EXPERTS] * 29, [range(4), range(26, 30)]),
        ([DENSE] * 10 + [EXPERTS] + [DENSE] * 10, [range(21)]),
    ],
    ids=["few", "alike", "in turn", "first dense", "one in the middle"],
)
def test_each_kind_of_layer_runs_once(widths: list[int], expected: list[range]) -> None:
    assert spans(runner(*widths)) == expected


def test_a_first_layer_that_makes_streams_is_in_the_span() -> None:
    model = runner(DENSE, DENSE, EXPERTS, *[DENSE] * 10)
    assert comparable(model) == range(13)
    model.own_layers[0].hc_attn_fn = torch.zeros(1)
    assert spans(model) == [range(3)]
    assert comparable(model) == range(3)


def test_the_model_walks_through_the_span_and_is_then_as_before() -> None:
    model = runner(*[DENSE] * 20)
    stack = model.model[0]
    with only(model, range(16, 20)) as times:
        assert (times, stack.start_layer, stack.end_layer) == (5.0, 17, 21)
    assert (stack.start_layer, stack.end_layer) == (1, 21)


def test_a_model_that_keeps_the_layers_it_walks_through_has_them_back() -> None:
    model = runner(*[DENSE] * 20)
    stack = model.model[0]
    walked = stack._active_layers = stack.layers[:]
    with only(model, range(3)):
        assert list(stack._active_layers) == model.own_layers[:3]
    assert stack._active_layers is walked


def test_a_model_that_walks_otherwise_runs_whole() -> None:
    model = runner(*[DENSE] * 20)
    del model.model[0].start_layer
    with only(model, range(16, 20)) as times:
        assert times == 1.0
