# SPDX-License-Identifier: Apache-2.0
"""Over which KV caches, and with which attention, PoC runs."""

from __future__ import annotations

from typing import get_args

import pytest

pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

from vllm.config.cache import CacheDType

from vllm_poc.worker.model.capabilities import ATTENTION_BY_CACHE_DTYPE, attention_refusal


def test_each_type_of_cache_of_the_release_is_decided() -> None:
    """One that a new release adds is refused until somebody decides."""
    assert set(get_args(CacheDType)) - ATTENTION_BY_CACHE_DTYPE.keys() == set()


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        ("auto", "CPUAttentionBackendImpl"),
        ("auto", "FlashAttentionImpl"),
        ("bfloat16", "FlashAttnMLAImpl"),
        ("fp8", "FlashAttentionImpl"),
        ("fp8_e4m3", "FlashInferImpl"),
        ("fp8_ds_mla", "DeepseekV4FlashMLAAttention"),
    ],
)
def test_what_is_proven_runs(dtype: str, attention: str) -> None:
    assert attention_refusal(dtype, attention) is None


WITHOUT_ATTENTION = sorted(dtype for dtype, known in ATTENTION_BY_CACHE_DTYPE.items() if not known)
ATTENTION = sorted({name for known in ATTENTION_BY_CACHE_DTYPE.values() for name in known})


def test_caches_with_scales_beside_them_and_packed_ones_have_no_attention() -> None:
    assert {"int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "fp8_inc"} <= set(
        WITHOUT_ATTENTION
    )


@pytest.mark.parametrize("dtype", [*WITHOUT_ATTENTION, "new_dtype"])
def test_a_cache_that_nothing_is_proven_over_is_refused_whatever_the_attention(dtype: str) -> None:
    for attention in (*ATTENTION, "NewImpl"):
        assert attention_refusal(dtype, attention) == (
            f"PoC is not proven to leave chat's KV cache alone with --kv-cache-dtype {dtype}: "
            "start vLLM with --kv-cache-dtype auto or fp8."
        )


@pytest.mark.parametrize("dtype", sorted(ATTENTION_BY_CACHE_DTYPE.keys() - set(WITHOUT_ATTENTION)))
def test_over_every_other_cache_what_is_not_listed_is_refused(dtype: str) -> None:
    for attention in {*ATTENTION, "NewImpl"} - ATTENTION_BY_CACHE_DTYPE[dtype]:
        reason = attention_refusal(dtype, attention)
        assert reason is not None
        assert f"{attention} over a KV cache of type {dtype}: choose another" in reason


@pytest.mark.parametrize(("dtype", "attention"), [("auto", "NewImpl"), ("fp8", "FlexAttentionImpl")])
def test_attention_that_is_not_on_the_list_is_refused(dtype: str, attention: str) -> None:
    assert attention_refusal(dtype, attention) == (
        f"PoC is not proven with {attention} over a KV cache of type {dtype}: "
        "choose another --attention-backend, or --kv-cache-dtype auto."
    )
