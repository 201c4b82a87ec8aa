# SPDX-License-Identifier: Apache-2.0
"""A forward pass that pauses between layers is computed as one that does not, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

import torch
from torch import Tensor, nn

from vllm_poc.worker.model.adapter import StageInputs
from vllm_poc.worker.passes.pausing import PausingPass, ends

INPUTS = torch.arange(6.0).view(1, 2, 3)


class Layer(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise ValueError("a layer fails")
        return 2 * x + 1


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        assert input_ids is None
        assert intermediate_tensors is None
        assert inputs_embeds is not None
        x = inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return x


class Adapter:
    """The model, and a note of which context it was computed in."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = Model()
        self.contexts: list[object] = []
        self.inside = False

    @contextmanager
    def computing(self, _plan: object, context: object = None) -> Iterator[object]:
        self.contexts.append(context)
        self.inside = True
        yield context or f"context {len(self.contexts)}"
        self.inside = False


def a_pass(adapter: Adapter, scale: float = 1.0) -> PausingPass:
    given: Any = adapter
    return PausingPass(given, StageInputs(scale * INPUTS, None))


def waiting() -> int:
    return sum(thread.name == "poc-forward-pass" for thread in threading.enumerate())


PLAN: Any = SimpleNamespace(positions=torch.zeros(2))


@pytest.mark.parametrize("parts", [1, 2, 3, 10])
def test_parts_give_what_the_whole_gives(parts: int) -> None:
    adapter = Adapter()
    forward, found = a_pass(adapter), []
    for end in ends(list(adapter.model.layers), parts):
        found.append(forward.run(PLAN, end))
        assert not adapter.inside
    assert found[:-1] == [None] * (min(parts, 3) - 1)
    assert found[-1] is not None
    assert torch.equal(found[-1], adapter.model(None, PLAN.positions, inputs_embeds=INPUTS[0]))
    assert adapter.contexts == [None, *["context 1"] * (min(parts, 3) - 1)], "vLLM's own goes on"
    assert waiting() == 0
    assert all(not layer._forward_hooks for layer in adapter.model.layers)


def test_another_pass_through_the_same_layers_does_not_pause() -> None:
    adapter = Adapter()
    first, second = adapter.model.layers[0], adapter.model.layers[1]
    forward, other = a_pass(adapter), a_pass(adapter)
    assert forward.run(PLAN, first) is None
    assert other.run(PLAN, second) is None
    assert waiting() == 2
    whole = a_pass(adapter).run(PLAN)
    found, others = forward.run(PLAN), other.run(PLAN)
    assert whole is not None
    assert found is not None
    assert others is not None
    assert torch.equal(found, whole)
    assert torch.equal(others, whole)


def test_an_error_is_the_callers_wherever_it_comes() -> None:
    adapter = Adapter()
    with pytest.raises(ValueError, match="a layer fails"):
        a_pass(adapter, 1000).run(PLAN, adapter.model.layers[1])
    forward = a_pass(adapter, 15)
    assert forward.run(PLAN, adapter.model.layers[0]) is None
    with pytest.raises(ValueError, match="a layer fails"):
        forward.run(PLAN)
    assert waiting() == 0


def test_a_pass_that_is_stopped_ends_where_it_waits() -> None:
    adapter = Adapter()
    for forward in (a_pass(adapter), a_pass(adapter)):
        assert forward.run(PLAN, adapter.model.layers[1]) is None
        forward.stop()
        assert waiting() == 0
        forward.stop()
    a_pass(adapter).stop()


def test_it_computes_without_gradients() -> None:
    adapter = Adapter()
    adapter.model.layers[2].register_forward_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    modes: list[bool] = []
    forward = a_pass(adapter)
    forward.run(PLAN, adapter.model.layers[0])
    forward.run(PLAN)
    assert modes == [True]
