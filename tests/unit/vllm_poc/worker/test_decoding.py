# SPDX-License-Identifier: Apache-2.0
"""What is refused before any chain begins: servers on which chains are not proven, and requests beyond the limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the worker environment: python3 -m hack.vllm")

from tests.support.fakes.engine import FACTS
from vllm_poc.rpc import DecodeRequest, DecodeSetup
from vllm_poc.worker.decoding import check_request
from vllm_poc.worker.model.capabilities import decode_refusal

SETUP = DecodeSetup(codebook="sphere_codebook.pt", rebuild=False, reserve_bytes=1)
REQUEST = DecodeRequest(
    block_hash="b10c",
    public_key="key",
    nonces=[1, 2],
    seq_len=4,
    max_tokens=3,
    forced=[],
    parts=1,
    cuts={"prefill": 1, "step": 1, "graph": 1},
)


def an_adapter(*, stages: int = 1, model: str = "qwen3", attention: str = "CPUAttentionBackendImpl") -> Any:  # noqa: ANN401
    return SimpleNamespace(
        ranks=SimpleNamespace(stages=stages),
        model_type=model,
        attention_kernels=[attention] if attention else [],
    )


@pytest.mark.parametrize(
    ("adapter", "setup", "hidden", "reason"),
    [
        ({}, {}, 256, None),
        ({}, {"codebook": None, "rebuild": True}, 256, None),
        ({}, {"codebook": None}, 256, "give the path of its sphere_codebook.pt"),
        ({}, {"reserve_bytes": 0}, 256, "set some aside"),
        ({"model": "llama"}, {}, 256, "not proven with llama"),
        ({"model": ""}, {}, 256, "not proven with this model"),
        ({"attention": "FlashAttentionImpl"}, {}, 256, None),
        ({"model": "deepseek_v4", "attention": "DeepseekV4FlashMLAAttention"}, {}, 256, None),
        ({"model": "glm5_next", "attention": "FlashAttnMLASparseImpl"}, {}, 256, None),
        ({"model": "glm5_next", "attention": "FlashMLASparseImpl"}, {}, 256, "not proven with FlashMLASparseImpl"),
        ({"attention": "TritonAttentionImpl"}, {}, 256, "not proven with TritonAttentionImpl"),
        ({"stages": 2}, {}, 256, "without --pipeline-parallel-size"),
        ({}, {}, 255, "hidden size is 255"),
    ],
)
def test_a_server_says_why_it_cannot_decode(
    adapter: dict[str, Any], setup: dict[str, Any], hidden: int, reason: str | None
) -> None:
    found = decode_refusal(an_adapter(**adapter), {**FACTS, "hidden_size": hidden}, {**SETUP, **setup})  # type: ignore[typeddict-item]
    assert found == reason if reason is None else found is not None and reason in found


def test_a_request_within_the_limits_is_not_refused() -> None:
    check_request(REQUEST, FACTS)
    check_request({**REQUEST, "forced": [[1], []]}, FACTS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nonces": []}, "holds 1..16 nonces"),
        ({"nonces": list(range(17))}, "holds 1..16 nonces"),
        ({"seq_len": 0}, r"must lie in 1..2048 \(--max-num-batched-tokens\)"),
        ({"seq_len": 2049}, r"must lie in 1..2048 \(--max-num-batched-tokens\)"),
        ({"max_tokens": 0}, "max_tokens 0 must be 1 or more"),
        ({"seq_len": 1000, "max_tokens": 25}, r"at most 1024 \(--max-model-len\)"),
        ({"forced": [[1]]}, "1 claims for 2 nonces"),
        ({"parts": 0}, "parts 0"),
        ({"cuts": {"prefill": 1, "step": 0, "graph": 1}}, "cuts 0"),
    ],
)
def test_a_request_beyond_the_limits_names_what_to_change(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_request({**REQUEST, **change}, FACTS)  # type: ignore[typeddict-item]
