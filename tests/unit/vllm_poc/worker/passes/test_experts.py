# SPDX-License-Identifier: Apache-2.0
"""Packed experts, with Triton's kernels run as Python: places of numbers, products, and what is left to vLLM."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytest.importorskip("triton.tools.tensor_descriptor", reason="needs a Triton with descriptors of tiles")

if TYPE_CHECKING:
    from torch import Tensor

EXPERTS, N, K, TOP_K = 3, 256, 128, 2


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels as Python code, which needs no GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.find_spec("vllm_poc.kernels.packed_experts")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def experts(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from vllm_poc.worker.passes import experts  # noqa: PLC0415 - needs vLLM

    monkeypatch.setattr(experts, "unpack", kernels.unpack)
    return experts


class Store:
    """Stands for vLLM's way to arrange weights, whose kernels are for GPUs: tiles in any order of pairs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        words = torch.randperm(128, generator=generator)[:, None] * 8
        self.places = (words + torch.randperm(8, generator=generator)).view(64 * 8 * 2)
        self.columns = torch.randperm(64, generator=generator)

    def __call__(self, layer: object, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor, *_: None) -> tuple[Any, ...]:
        del layer
        words, scales = zip(*(self.arranged(*pair) for pair in ((w13, s13), (w2, s2))), strict=True)
        return *words, *scales, None, None

    def arranged(self, packed: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
        experts, n, half = packed.shape
        numbers = torch.stack([packed & 15, packed >> 4], dim=-1).view(experts, n // 64, 64, half // 8, 16)
        tiles = torch.zeros(experts, half // 8, n // 64, 1024, dtype=torch.int32)
        tiles[..., self.places] = numbers.permute(0, 3, 1, 2, 4).reshape(experts, half // 8, n // 64, 1024).int()
        words = (tiles.view(-1, 8) << (4 * torch.arange(8, dtype=torch.int32))).sum(dim=1, dtype=torch.int32)
        scales = torch.zeros(experts, powers.shape[2], n // 64, 64, dtype=torch.uint8)
        scales[..., self.columns] = powers.view(experts, n // 64, 64, -1).permute(0, 3, 1, 2)
        stored = scales.view(experts, -1, n).view(torch.float8_e8m0fnu)
        return words.view(experts, half // 8, 2 * n), stored


def test_the_layout_is_found_by_what_vllm_does(experts: ModuleType) -> None:
    store = Store()
    found = experts._found_layout(store, torch.device("cpu"))
    assert found is not None
    assert torch.equal(found.places.flatten(), store.places.int())
    assert torch.equal(found.columns, store.columns.int())


@pytest.mark.parametrize("fault", ["pairs apart", "across tiles", "other numbers"])
def test_an_unknown_layout_is_left_to_vllm(experts: ModuleType, fault: str) -> None:
    store = Store()

    def changed(*given: Tensor) -> tuple[Any, ...]:
        words, w2, *rest = store(*given)
        if fault == "across tiles":
            words = words.flip(2)
        if fault == "other numbers":
            words = words ^ 8
        return words, w2, *rest

    if fault == "pairs apart":
        store.places = store.places.roll(1)
    assert experts._found_layout(changed, torch.device("cpu")) is None


def test_a_way_to_arrange_that_fails_is_left_to_vllm(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def changed(an_argument_more: object) -> None:
        del an_argument_more

    monkeypatch.setitem(sys.modules, experts._PREPARATION, SimpleNamespace(**{experts._ARRANGE: changed}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    adapter = SimpleNamespace(expert_kernels=["MarlinExperts"], device=torch.device("cpu"))
    assert experts.expert_layout(adapter) is None
    assert "slower" in caplog.text


@pytest.mark.parametrize(
    ("capability", "named"), [((12, 0), ["MarlinExperts"]), ((8, 9), ["MarlinExperts"]), ((9, 0), ["TritonExperts"])]
)
def test_where_nothing_is_looked_for(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], named: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(experts, "_found_layout", lambda *_: object())
    monkeypatch.setitem(sys.modules, experts._PREPARATION, SimpleNamespace(**{experts._ARRANGE: object()}))
    assert experts.expert_layout(SimpleNamespace(expert_kernels=named, device=torch.device("cpu"))) is None


def test_how_much_is_unpacked_at_a_time(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.int32), requires_grad=False)
    adapter = SimpleNamespace(model=torch.nn.Sequential(layer, torch.nn.Linear(2, 2)))
    assert experts.unpacked_bytes(adapter) == 4 * 4 * 8 * 4
    monkeypatch.setattr(experts, "_UNPACKED", 100)
    assert experts.unpacked_bytes(adapter) == 100


def test_products(kernels: ModuleType) -> None:
    generator = torch.Generator().manual_seed(7)
    tokens = 5
    # Triton's interpreter has no products of bfloat16.
    x, weights = torch.randn(tokens, K, generator=generator), torch.randn(EXPERTS, N, K, generator=generator)
    factors = torch.rand(tokens * TOP_K, generator=generator)
    chosen = torch.tensor([[0, 2], [2, 0], [2, 1], [0, 1], [2, 0]]).flatten()
    slots = torch.full((4 * kernels.ROWS,), tokens * TOP_K, dtype=torch.int32)
    for expert in range(EXPERTS):
        own = (chosen == expert).nonzero().flatten()
        slots[expert * kernels.ROWS :][: len(own)] = own.int()
    owners = torch.tensor([0, 1, 2, 99], dtype=torch.int32)
    rows = kernels.ExpertRows(slots, owners, torch.tensor([EXPERTS * kernels.ROWS], dtype=torch.int32))
    made = torch.zeros(len(slots), N, dtype=torch.bfloat16)
    out = torch.zeros(tokens * TOP_K, N, dtype=torch.bfloat16)
    for first in range(EXPERTS):
        kernels.multiply(x, weights[first : first + 1], first, rows, made, top_k=TOP_K)
    rows_of_x = torch.zeros(len(slots), K)
    inside = slots < tokens * TOP_K
    rows_of_x[inside] = x[slots[inside].long() // TOP_K]
    kernels.multiply_weighted(rows_of_x, weights[:2], 0, rows, out, factors)
    kernels.multiply_weighted(rows_of_x, weights[2:], 2, rows, out, factors)
    exact = torch.stack([x[slot // TOP_K].double() @ weights[chosen[slot]].double().T for slot in range(len(chosen))])
    torch.testing.assert_close(made[inside].double(), exact[slots[inside].long()], atol=0.05, rtol=0.01)
    torch.testing.assert_close(out.double(), exact * factors[:, None].double(), atol=0.05, rtol=0.02)


def _known_call() -> dict[str, Any]:
    hidden, inner, scale = 512, 256, torch.zeros(1).view(torch.uint8).view(torch.float8_e8m0fnu)
    return {
        "hidden_states": torch.zeros(2, hidden, dtype=torch.bfloat16),
        "w1": torch.zeros(EXPERTS, hidden // 16, 4 * inner),
        "w2": torch.zeros(EXPERTS, inner // 16, 2 * hidden),
        "w1_scale": scale,
        "w2_scale": scale,
        "bias1": None,
        "expert_map": None,
        **dict.fromkeys(("activation_func", "moe_sum", "output", "intermediate_cache13"), object()),
    }


@pytest.mark.parametrize(
    ("changed", "covered"),
    [
        ({}, True),
        ({"apply_router_weight_on_input": False}, True),
        ({"apply_router_weight_on_input": True}, False),
        ({"bias1": object()}, False),
        ({"expert_map": object()}, False),
        ({"input_dtype": torch.float8_e4m3fn}, False),
        ({"moe_sum": None}, False),
        ({"activation_func": None}, False),
        ({"hidden_states": torch.zeros(2, 512, dtype=torch.float16)}, False),
        ({"w2_scale": torch.zeros(1, dtype=torch.bfloat16)}, False),
        ({"w1": torch.zeros(EXPERTS, 32, 2048)}, False),
        ({"an argument of a later release": None}, False),
    ],
)
def test_which_calls_are_known(experts: ModuleType, changed: dict[str, Any], covered: bool) -> None:
    assert experts._covers(_known_call() | changed) is covered


def test_other_calls_go_to_vllm_as_they_are(experts: ModuleType) -> None:
    def original(*given: object, **named: object) -> tuple[object, object]:
        return given, named

    call = _known_call() | {"bias1": object()}
    assert experts._experts(original, SimpleNamespace(), **call) == ((), call)
    assert experts._experts(original, SimpleNamespace(), 1, 2) == ((1, 2), {})
