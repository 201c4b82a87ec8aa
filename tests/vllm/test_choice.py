# SPDX-License-Identifier: Apache-2.0
"""Which way of computing is chosen by what a trial of both gave; the GPU and the trial are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

if TYPE_CHECKING:
    from torch import Tensor

ONES = torch.ones(4, 8)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The plain way and the fused one, and what the trial of each gives."""
    from vllm_poc.worker import choice  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.fusion import attention  # noqa: PLC0415
    from vllm_poc.worker.memory import Memory  # noqa: PLC0415

    runner = SimpleNamespace(device=torch.device("cuda"), ranks=SimpleNamespace(agreed=bool), groups=[])
    plain = SimpleNamespace(stage=SimpleNamespace(runner=runner))
    fused = SimpleNamespace(stage=object(), memory=Memory(torch.device("cpu")))
    ways = SimpleNamespace(plain=plain, fused=fused, expected=[ONES, ONES], found=[ONES, ONES], chosen=choice.chosen)
    monkeypatch.setattr(choice, "_prepared", lambda *_: fused)
    monkeypatch.setattr(choice, "trial", lambda stage: ways.found if stage is fused.stage else ways.expected)
    monkeypatch.setattr(attention, "needs_no_cache", lambda _: True)
    return ways


@pytest.mark.parametrize("found", [[ONES, ONES], [ONES, 1.1 * ONES]])
def test_what_gives_the_same_is_chosen(ways: Any, found: list[Tensor]) -> None:  # noqa: ANN401 - a namespace
    ways.found = found
    assert ways.chosen(ways.plain) is ways.fused


@pytest.mark.parametrize("found", [[ONES, 2 * ONES], [ONES, torch.nan * ONES], [torch.nan * ONES, ONES], None])
def test_what_does_not_is_not(ways: Any, found: list[Tensor] | None) -> None:  # noqa: ANN401
    ways.found = found
    assert ways.chosen(ways.plain) is ways.plain


def test_attention_of_another_form_is_left_to_vllm(ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    from vllm_poc.worker.fusion import attention  # noqa: PLC0415

    monkeypatch.delattr(attention, "needs_no_cache")
    assert ways.chosen(ways.plain) is ways.plain
