# SPDX-License-Identifier: Apache-2.0
"""What GLM-5.3's layers are given instead of vLLM's functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

from vllm_poc.worker.model.scratch import BatchShape  # noqa: E402
from vllm_poc.worker.passes import recurrent  # noqa: E402
from vllm_poc.worker.passes.attention import MAX_PLANS  # noqa: E402
from vllm_poc.worker.passes.plain import patched  # noqa: E402


def starts(shape: BatchShape) -> Any:  # noqa: ANN401 - a tensor
    return torch.arange(0, shape.tokens + 1, shape.seq_len, dtype=torch.int32)


@pytest.mark.parametrize("shape", [BatchShape(3, 64), BatchShape(2, 100), BatchShape(1, 17), BatchShape(4, 1024)])
@pytest.mark.parametrize("size", [16, 64])
def test_chunks_are_those_of_vllms_kernels(shape: BatchShape, size: int) -> None:
    """vLLM asks the device for the lengths of sequences, which a CUDA graph cannot."""
    index = pytest.importorskip("vllm.third_party.flash_linear_attention.ops.index")
    chunks = recurrent.Chunks()
    for ours, vllms in ((chunks.indices, "prepare_chunk_indices"), (chunks.offsets, "prepare_chunk_offsets")):
        found, expected = ours(shape, starts(shape), size), getattr(index, vllms)(starts(shape), size)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        assert ours(shape, starts(shape), size) is found, "graphs read it as long as they live"


def test_chunks_of_the_last_shapes_are_kept() -> None:
    chunks = recurrent.Chunks()
    for nonces in range(1, 3 * MAX_PLANS):
        shape = BatchShape(nonces, 64)
        chunks.indices(shape, starts(shape), 64)
    assert len(chunks.kept()) == MAX_PLANS


class UnquantizedLinearMethod:
    """Named as vLLM's."""

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:  # noqa: ANN401
        return torch.nn.functional.linear(x, layer.weight, bias)


class GateLinear(torch.nn.Linear):  # type: ignore[misc, name-defined]
    """Named as vLLM's, which also returns a bias."""

    out_dtype = torch.bfloat16

    def forward(self, x: Any) -> Any:  # noqa: ANN401
        return super().forward(x), None


def test_products_have_as_many_rows_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "ROWS", 8)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), GateLinear(4, 2, bias=False))
    model[0].quant_method = UnquantizedLinearMethod()
    rows, mm = list[int](), torch.mm

    def counted(x: Any, *others: Any, **out: Any) -> Any:  # noqa: ANN401
        rows.append(len(x))
        return mm(x, *others, **out)

    monkeypatch.setattr(torch, "mm", counted)
    x = torch.randn(19, 4)
    with torch.inference_mode(), patched(recurrent.recurrent_patches(model, BatchShape(1, 19), recurrent.Chunks())):
        found, (logits, none) = model[0].quant_method.apply(model[0], x), model[1](x)
    assert rows == [8, 8, 8]
    torch.testing.assert_close(found, x @ model[0].weight.t())
    torch.testing.assert_close(logits, x @ model[1].weight.t())
    assert none is None
    assert "apply" not in vars(model[0].quant_method)
    assert "forward" not in vars(model[1])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["Glm5NextLinearAttention", "MLAAttention", "Glm5NextIndexerCache", "Glm5NextTailCache"], True),
        (["Glm5NextLinearAttention"], True),
        (["MLAAttention"], False),
        (["Glm5NextLinearAttention", "Attention"], False),
        ([], False),
    ],
)
def test_which_attention_is_recurrent(names: list[str], expected: bool) -> None:
    layers: list[Any] = [type(name, (SimpleNamespace,), {})() for name in names]
    assert recurrent.is_recurrent(layers) is expected
