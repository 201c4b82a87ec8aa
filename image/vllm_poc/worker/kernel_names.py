# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's kernels the server has chosen: those of another GPU or setting round differently."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_poc.worker.internals import Runner


def attention_kernels(runner: Runner) -> list[str]:
    """Return the classes that compute attention."""
    return _named(layer.impl for group in runner.groups for layer in group.layers.values())


def expert_kernels(runner: Runner) -> list[str]:
    """Return the classes that compute experts; empty without experts, or if they have none of their own."""
    methods = (getattr(module, "quant_method", None) for module in runner.model.modules())
    kernels = (getattr(method, "moe_kernel", None) for method in methods)
    return _named(kernel.impl.fused_experts for kernel in kernels if kernel is not None)


def _named(objects: Iterable[object]) -> list[str]:
    return sorted({type(found).__name__ for found in objects})
