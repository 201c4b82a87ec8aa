# SPDX-License-Identifier: Apache-2.0
"""Experts with weights of 4 bits: unpacked exactly, with the products of vLLM's Marlin kernels but for their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment")
marlin = pytest.importorskip(
    "vllm.model_executor.layers.fused_moe.experts.marlin_moe", reason="this release of vLLM has no such experts"
)

from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation  # noqa: E402
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4  # noqa: E402
from vllm.scalar_type import scalar_types  # noqa: E402

from vllm_poc.kernels.packed_experts import unpack  # noqa: E402
from vllm_poc.worker.passes.experts import expert_layout, expert_patches  # noqa: E402
from vllm_poc.worker.passes.plain import patched  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_poc.kernels.packed_experts import PackedLayout

EXPERTS, HIDDEN, INNER, TOP_K = 16, 512, 256, 6
SIZES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.fixture(scope="module")
def layout() -> PackedLayout:
    adapter: Any = SimpleNamespace(expert_kernels=["MarlinExperts"], device=torch.device("cuda"))
    found = expert_layout(adapter)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, Tensor]:
    """Weights as a checkpoint has them: two numbers a byte, and an exponent of two for 32 of them."""
    shapes = {"w13": (EXPERTS, 2 * INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER)}
    made = {name: torch.randint(0, 256, (e, n, k // 2), device="cuda").byte() for name, (e, n, k) in shapes.items()}
    return made | {
        f"{name}_scale": torch.randint(117, 123, (e, n, k // 32), device="cuda").byte()
        for name, (e, n, k) in shapes.items()
    }


@pytest.fixture(scope="module")
def arranged(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    layer = SimpleNamespace(params_dtype=torch.bfloat16)
    given = [checkpoint[name].clone() for name in ("w13", "w2", "w13_scale", "w2_scale")]
    w1, w2, w1_scale, w2_scale, *_ = marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin(layer, *given, None, None)
    return {"w1": w1, "w2": w2, "w1_scale": w1_scale, "w2_scale": w2_scale}


def _values(packed: Tensor, scales: Tensor) -> Tensor:
    numbers = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    values = torch.tensor([*SIZES, *(-size for size in SIZES)], device="cuda")[numbers]
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=-1)


def _call(arranged: dict[str, Tensor], x: Tensor, topk_ids: Tensor, weights: Tensor, **changed: object) -> Tensor:
    """Call the experts as vLLM does."""
    tokens = len(x)

    def activation(kind: MoEActivation, out: Tensor, values: Tensor, **_: object) -> None:
        apply_moe_activation(kind, out, values)

    def total(made: Tensor, out: Tensor, *_: object) -> None:
        torch.sum(made, dim=1, out=out)

    call: dict[str, Any] = {
        "hidden_states": x,
        **arranged,
        "bias1": None,
        "bias2": None,
        "topk_weights": weights,
        "topk_ids": topk_ids,
        "quant_type_id": scalar_types.float4_e2m1f.id,
        "global_num_experts": EXPERTS,
        "activation": MoEActivation.SILU,
        "activation_func": activation,
        "moe_sum": total,
        "expert_map": None,
        "output": torch.empty_like(x),
        "intermediate_cache13": torch.empty(tokens * TOP_K * max(2 * INNER, HIDDEN), device="cuda", dtype=x.dtype),
        "intermediate_cache2": torch.empty(tokens * TOP_K * INNER, device="cuda", dtype=x.dtype),
    }
    call |= changed
    marlin.fused_marlin_moe(**call)
    output: Tensor = call["output"]
    return output


def _tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
    scores = torch.rand(count, EXPERTS, device="cuda")
    weights, topk_ids = scores.topk(TOP_K)
    return x, topk_ids.int(), weights


def _exact(checkpoint: dict[str, Tensor], x: Tensor, topk_ids: Tensor, weights: Tensor) -> Tensor:
    first = _values(checkpoint["w13"], checkpoint["w13_scale"]).double()
    second = _values(checkpoint["w2"], checkpoint["w2_scale"]).double()
    out = torch.zeros(len(x), HIDDEN, device="cuda", dtype=torch.float64)
    for expert in range(EXPERTS):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ first[expert].T).chunk(2, dim=1)
        made = (torch.nn.functional.silu(gate) * up) @ second[expert].T
        out.index_add_(0, token, made * weights[token, slot].double()[:, None])
    return out


@pytest.mark.parametrize("matrix", ["w1", "w2"])
def test_weights_are_unpacked_exactly(
    layout: PackedLayout, checkpoint: dict[str, Tensor], arranged: dict[str, Tensor], matrix: str
) -> None:
    name = "w13" if matrix == "w1" else matrix
    expected = _values(checkpoint[name], checkpoint[f"{name}_scale"])
    found = torch.empty(expected.shape, device="cuda", dtype=torch.bfloat16)
    unpack(arranged[matrix], arranged[f"{matrix}_scale"].view(torch.uint8), layout, found)
    assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("count", [1, 100, 4096])
def test_experts_are_as_near_to_exact_ones_as_vllms(
    layout: PackedLayout, checkpoint: dict[str, Tensor], arranged: dict[str, Tensor], count: int
) -> None:
    tokens = _tokens(count)
    exact = _exact(checkpoint, *tokens)
    vllms = _call(arranged, *tokens)
    before = marlin.fused_marlin_moe
    with patched(expert_patches(layout)):
        assert marlin.fused_marlin_moe is not before
        found = _call(arranged, *tokens)
    error, usual = ((values.double() - exact).norm().item() for values in (found, vllms))
    assert error <= 1.05 * usual
    assert usual <= 0.02 * exact.norm().item()


def test_a_token_has_the_same_bits_in_any_batch(layout: PackedLayout, arranged: dict[str, Tensor]) -> None:
    x, topk_ids, weights = _tokens(2048)
    with patched(expert_patches(layout)):
        together = _call(arranged, x, topk_ids, weights)
        some = _call(arranged, x[700:733], topk_ids[700:733].contiguous(), weights[700:733].contiguous())
    assert torch.equal(some, together[700:733])


@pytest.mark.parametrize("at_once", [1, 5, EXPERTS])
def test_weights_are_unpacked_for_some_experts_at_a_time(
    layout: PackedLayout, arranged: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    tokens = _tokens(300)
    with patched(expert_patches(layout)):
        expected = _call(arranged, *tokens)
        monkeypatch.setattr("vllm_poc.worker.passes.experts._UNPACKED", at_once * 2 * HIDDEN * INNER)
        assert torch.equal(_call(arranged, *tokens), expected)


def test_what_is_not_covered_is_left_to_vllm(layout: PackedLayout, arranged: dict[str, Tensor]) -> None:
    x, topk_ids, weights = _tokens(50)
    local = torch.arange(EXPERTS, device="cuda", dtype=torch.int32)
    expected = _call(arranged, x, topk_ids, weights, expert_map=local)
    with patched(expert_patches(layout)):
        assert torch.equal(_call(arranged, x, topk_ids, weights, expert_map=local), expected)
        assert not torch.equal(_call(arranged, x, topk_ids, weights), torch.zeros_like(x))
