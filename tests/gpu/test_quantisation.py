# SPDX-License-Identifier: Apache-2.0
"""The fused pass quantises as vLLM does: the same bits in the same layout."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment")
fp8_utils = pytest.importorskip(
    "vllm.model_executor.layers.quantization.utils.fp8_utils", reason="needs the worker environment"
)

from torch import dtype as DType  # noqa: E402, N812

from vllm_poc.worker.passes.plain import patched  # noqa: E402
from vllm_poc.worker.passes.quantisation import quantisation_patches  # noqa: E402


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
    assert (found.stride(), scales.stride()) == (expected.stride(), expected_scales.stride())


@pytest.mark.parametrize("other", ["its own memory", "another size of groups", "float32", "a part of wider rows"])
def test_what_the_kernel_does_not_cover_is_left_to_vllm(other: str) -> None:
    wide = torch.randn(30, 1024, device="cuda", dtype=torch.float32 if other == "float32" else torch.bfloat16)
    x = wide[:, :512] if other == "a part of wider rows" else wide
    groups = 64 if other == "another size of groups" else 128
    out = torch.empty(x.shape, device="cuda", dtype=torch.float8_e4m3fn) if other == "its own memory" else None
    expected, expected_scales = fp8_utils.per_token_group_quant_fp8(x, groups)
    with patched(quantisation_patches()):
        found, scales = fp8_utils.per_token_group_quant_fp8(x, groups, out_q=out)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert out is None or found is out


def test_experts_call_it_too() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.fused_moe.utils", reason="needs the worker environment")
    original = utils.per_token_group_quant_fp8
    with patched(quantisation_patches()):
        assert utils.per_token_group_quant_fp8 is not original
    assert utils.per_token_group_quant_fp8 is original
