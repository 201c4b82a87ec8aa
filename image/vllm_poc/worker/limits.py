# SPDX-License-Identifier: Apache-2.0
"""What the server's configuration allows PoC, and why it may forbid it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch import nn

from vllm_poc.worker.internals import BatchShape

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

# Parts of vLLM's configuration that change what a forward pass computes or writes, and their flags.
_FORBIDDEN = {
    "lora_config": "--enable-lora",
    "speculative_config": "--speculative-config",
    "kv_transfer_config": "--kv-transfer-config",
}
_PARALLEL_SIZES = {
    "data_parallel_size": "--data-parallel-size",
    "decode_context_parallel_size": "--decode-context-parallel-size",
    "prefill_context_parallel_size": "--prefill-context-parallel-size",
}


@dataclass(frozen=True)
class Limits:
    """Sizes of the served model and of the largest PoC batch."""

    hidden_size: int
    num_layers: int
    max_model_len: int
    max_batch_tokens: int
    max_batch_nonces: int

    @classmethod
    def of(cls, config: VllmConfig) -> Self:
        """Read the sizes; vLLM sizes its own workspaces for the same largest batch."""
        return cls(
            hidden_size=config.model_config.get_hidden_size(),
            num_layers=config.model_config.get_total_num_hidden_layers(),
            max_model_len=config.model_config.max_model_len,
            max_batch_tokens=config.scheduler_config.max_num_batched_tokens,
            max_batch_nonces=config.scheduler_config.max_num_seqs,
        )

    def check(self, shape: BatchShape) -> None:
        """Raise ValueError if a batch is empty or too large."""
        if not 1 <= shape.nonces <= self.max_batch_nonces:
            raise ValueError(f"a batch holds 1..{self.max_batch_nonces} nonces (--max-num-seqs), not {shape.nonces}")
        if not 1 <= shape.seq_len <= self.max_model_len:
            raise ValueError(f"seq_len {shape.seq_len} must lie in 1..{self.max_model_len} (--max-model-len)")
        if shape.tokens > self.max_batch_tokens:
            raise ValueError(
                f"a batch holds up to {self.max_batch_tokens} tokens, not {shape.tokens} (--max-num-batched-tokens)"
            )


def refusal(config: VllmConfig, model: nn.Module) -> str | None:
    """Return one sentence that says why PoC cannot run with this configuration and model, or None."""
    return _parallel_refusal(config.parallel_config) or _section_refusal(config) or _model_refusal(config, model)


def _parallel_refusal(parallel: ParallelConfig) -> str | None:
    for name, flag in _PARALLEL_SIZES.items():
        size = getattr(parallel, name, 1)
        if size != 1:
            return f"PoC would not run the same on all ranks: start vLLM with {flag} 1 instead of {size}."
    return None


def _section_refusal(config: VllmConfig) -> str | None:
    for name, flag in _FORBIDDEN.items():
        if getattr(config, name, None) is not None:
            return f"PoC results would depend on {flag}: start vLLM without it."
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "PoC results would depend on the first chat with --calculate-kv-scales: start vLLM without it."
    return None


def _model_refusal(config: VllmConfig, model: nn.Module) -> str | None:
    name = type(model).__name__
    if config.model_config.runner_type != "generate":
        return f"{name} generates nothing under --runner {config.model_config.runner_type}: serve it for chat."
    if config.model_config.uses_mrope:
        return f"{name} has positions of several dimensions, which PoC does not make: serve another model."
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no inputs_embeds, the inputs of PoC: serve another model."
    if any(_routes_by_token(*parameter) for parameter in model.named_parameters()):
        return f"{name} routes experts by token id, and PoC has no tokens: serve another model."
    return None


def _routes_by_token(name: str, parameter: nn.Parameter) -> bool:
    return ".gate." in name and not parameter.is_floating_point()
