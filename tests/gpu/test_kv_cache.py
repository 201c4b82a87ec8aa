# SPDX-License-Identifier: Apache-2.0
"""Keys and values get into an FP8 cache with the bits of vLLM's own kernel, whatever the cache's layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment")
flash_attn = pytest.importorskip("vllm.v1.attention.backends.flash_attn", reason="needs the worker environment")

from torch import dtype as DType  # noqa: E402, N812

from vllm_poc.worker.passes.attention import cache_patches  # noqa: E402
from vllm_poc.worker.passes.plain import patched  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS, BLOCK, HEADS, HEAD_DIM, TOKENS = 40, 16, 8, 128, 501


def caches(layout: str) -> tuple[Tensor, Tensor]:
    """Caches of keys and values as views of one tensor, each ``[blocks, tokens, heads, columns]``."""
    if layout == "keys, then values":
        keys, values = torch.zeros(BLOCKS, 2, BLOCK, HEADS, HEAD_DIM, dtype=torch.uint8, device="cuda").unbind(1)
        return keys, values
    whole = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * HEAD_DIM, dtype=torch.uint8, device="cuda")
    keys, values = whole.transpose(1, 2).split(HEAD_DIM, dim=-1)
    return keys, values


@pytest.mark.parametrize("layout", ["keys, then values", "keys beside values"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 2.9)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_bits(layout: str, scales: tuple[float, float], kind: DType) -> None:
    magnitude = 2.0 ** torch.randint(-14, 12, (TOKENS, 1), device="cuda")
    qkv = (torch.randn(TOKENS, 6 * HEADS * HEAD_DIM, device="cuda") * magnitude).to(kind)
    qkv[7, -5:] = torch.tensor([torch.nan, torch.inf, -torch.inf, 448.0, -1e4])
    key, value = qkv.view(TOKENS, -1, HEAD_DIM)[:, -2 * HEADS :].split(HEADS, dim=1)
    slots = torch.randperm(BLOCKS * BLOCK, device="cuda")[:TOKENS]
    slots[3] = -1
    k_scale, v_scale = (torch.tensor(scale, device="cuda") for scale in scales)
    written = []
    for patches in ([], list(cache_patches())):
        places = caches(layout)
        with patched(patches):
            flash_attn.reshape_and_cache_flash(key, value, *places, slots, "fp8", k_scale, v_scale)
        written.append(places)
    assert patches, "there is something to replace"
    for expected, found in zip(*written, strict=True):
        assert expected.any()
        assert torch.equal(found, expected)


def test_what_the_kernel_does_not_cover_is_left_to_vllm() -> None:
    key = torch.randn(TOKENS, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    places = torch.zeros(2, BLOCKS, BLOCK, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    slots, scale = torch.arange(TOKENS, device="cuda"), torch.ones((), device="cuda")
    with patched(cache_patches()):
        flash_attn.reshape_and_cache_flash(key, 2 * key, *places, slots, "auto", scale, scale)
    assert torch.equal(places.flatten(1, 2)[0, :TOKENS], key)
    assert torch.equal(places.flatten(1, 2)[1, :TOKENS], 2 * key)
