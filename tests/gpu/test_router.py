# SPDX-License-Identifier: Apache-2.0
"""The router's product is as exact as one in float32, whatever the size of weights."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment")
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

from vllm_poc.kernels.router import exact_product, in_parts  # noqa: E402


@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize("columns", [100, 3072])
def test_parts_sum_to_the_weights(rows: int, columns: int) -> None:
    magnitude = 2.0 ** torch.randint(-60, 60, (rows, columns), device="cuda")
    weight = torch.randn(rows, columns, device="cuda") * magnitude
    weight[0, 0] = 0
    parts = in_parts(weight)
    assert torch.equal(parts.double().sum(dim=0), weight.double())


@pytest.mark.parametrize("tokens", [1, 301, 8192])
@pytest.mark.parametrize(("experts", "columns"), [(256, 3072), (100, 200)])
def test_product(tokens: int, experts: int, columns: int) -> None:
    x = torch.randn(tokens, 2 * columns, device="cuda").bfloat16()[:, :columns]
    weight = torch.randn(experts, columns, device="cuda") * columns**-0.5
    found, exact = exact_product(x, weight), x.double() @ weight.double().T
    in_float32 = torch.nn.functional.linear(x.float(), weight)
    assert found.dtype is torch.float32
    error, usual = ((values - exact).abs().max().item() for values in (found, in_float32))
    assert error <= 2 * usual, "no further from the exact product than float32 is"


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weight = torch.randn(8192, 3072, device="cuda").bfloat16(), torch.randn(256, 3072, device="cuda")
    together = exact_product(x, weight)
    assert torch.equal(exact_product(x[5000:5033], weight), together[5000:5033])


def test_which_modules_are_routers() -> None:
    operations = pytest.importorskip("vllm_poc.worker.passes.operations", reason="needs vLLM")

    def router(**changed: object) -> Any:  # noqa: ANN401 - stands for vLLM's module
        module = type("GateLinear", (torch.nn.Module,), {})()
        module.weight = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        module.bias, module.out_dtype, module.return_bias = None, torch.float32, True
        for name, value in changed.items():
            setattr(module, name, value)
        return module

    assert operations.is_exact_router(router())
    in_bfloat16 = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16), requires_grad=False)
    assert not operations.is_exact_router(router(weight=in_bfloat16))
    assert not operations.is_exact_router(router(out_dtype=None))
    assert not operations.is_exact_router(torch.nn.Linear(8, 4))
