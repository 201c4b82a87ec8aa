# SPDX-License-Identifier: Apache-2.0
"""The fused pass quantises as vLLM does: the same bits in the same layout."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment")
fp8_utils = pytest.importorskip(
    "vllm.model_executor.layers.quantization.utils.fp8_utils", reason="needs the worker environment"
)

from torch import dtype as DType  # noqa: E402, N812

from vllm_poc.worker.fusion.patches import patched  # noqa: E402
from vllm_poc.worker.fusion.quantisation import quantisation_patches  # noqa: E402


@pytest.mark.parametrize("rows", [1, 301, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("powers_of_two", [False, True, None])
@pytest.mark.parametrize(("columns", "aligned"), [(False, False), (True, False), (True, True)])
def test_bits_and_layout(rows: int, dtype: DType, powers_of_two: bool | None, columns: bool, aligned: bool) -> None:
    x = torch.randn(rows, 5120, device="cuda").mul(2.0 ** torch.randint(-12, 8, (rows, 1), device="cuda")).to(dtype)
    x[:, :128] = 0
    x[:, 128:256] = torch.linspace(-56, 56, 128, device="cuda")  # the scale is a power of two
    layout = {"column_major_scales": columns, "tma_aligned_scales": aligned, "use_ue8m0": powers_of_two}
    expected, expected_scales = fp8_utils.per_token_group_quant_fp8(x, 128, **layout)
    before = fp8_utils.per_token_group_quant_fp8
    with patched(quantisation_patches()):
        assert fp8_utils.per_token_group_quant_fp8 is not before
        found, scales = fp8_utils.per_token_group_quant_fp8(x, 128, **layout)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert scales.stride() == expected_scales.stride()
