# SPDX-License-Identifier: Apache-2.0
"""The last layer finishes the last tokens alone, where its form is known."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")

from torch import Tensor, nn  # noqa: E402

NONCES, SEQ_LEN, HIDDEN = 2, 3, 16


class Layer(nn.Module):  # type: ignore[misc]
    """Attention that adds up nothing, and the norm behind it."""

    def __init__(self) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config  # noqa: PLC0415
        from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: PLC0415

        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.attn = nn.Identity()
        with set_current_vllm_config(VllmConfig()):
            self.post_attention_layernorm = RMSNorm(HIDDEN)


class WithResidual(Layer):
    """As in Qwen and Llama."""

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = self.post_attention_layernorm(self.self_attn.attn(hidden), residual)
        return normed, total


class WithoutResidual(Layer):
    """As in Granite and OLMo 2."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        attended = hidden + self.self_attn.attn(hidden)
        return self.post_attention_layernorm(attended), attended


@pytest.mark.parametrize("form", [WithResidual, WithoutResidual])
def test_what_is_left_of_a_layers_tokens(form: type[Layer]) -> None:
    from vllm_poc.worker.model.scratch import BatchShape  # noqa: PLC0415
    from vllm_poc.worker.passes.fused import last_tokens_only  # noqa: PLC0415 - needs vLLM

    layer, hidden = form(), torch.randn(NONCES * SEQ_LEN, HIDDEN)
    inputs = [hidden, torch.randn_like(hidden)] if form is WithResidual else [hidden]
    expected = [part.clone() for part in layer(*(value.clone() for value in inputs))]
    with last_tokens_only(layer, BatchShape(NONCES, SEQ_LEN)):
        found = layer(*inputs)
    kept = slice(SEQ_LEN - 1, None, SEQ_LEN) if form is WithResidual else slice(None)
    for part, whole in zip(found, expected, strict=True):
        assert torch.equal(part, whole[kept])
