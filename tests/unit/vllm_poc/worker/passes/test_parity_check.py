# SPDX-License-Identifier: Apache-2.0
"""Which pass is chosen by what the parity check of both gave; the GPU and the hidden states are made up."""

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
    """Runners with the plain pass and the fused one, and the hidden states of each."""
    from vllm_poc.worker import extension  # noqa: PLC0415 - needs vLLM
    from vllm_poc.worker.memory import Memory  # noqa: PLC0415
    from vllm_poc.worker.passes import attention  # noqa: PLC0415

    adapter = SimpleNamespace(device=torch.device("cuda"), ranks=SimpleNamespace(agreed=bool), attention_layers={})
    plain = SimpleNamespace(stage=SimpleNamespace(adapter=adapter))
    fused = SimpleNamespace(stage=object(), memory=Memory(torch.device("cpu")))
    ways = SimpleNamespace(
        plain=plain, fused=fused, expected=[ONES, ONES], found=[ONES, ONES], fastest=extension.fastest
    )
    monkeypatch.setattr(extension, "_with_fused_pass", lambda *_: fused)
    monkeypatch.setattr(extension, "hidden_states", lambda stage: ways.found if stage is fused.stage else ways.expected)
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
