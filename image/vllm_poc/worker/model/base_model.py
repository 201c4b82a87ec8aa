# SPDX-License-Identifier: Apache-2.0
"""The base model alone: what vLLM adds to a forward pass for chat, and what PoC's pass has none of.

These are adapters, the KV connector, and the statistics by which vLLM's load balancer places experts on ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from vllm.distributed.kv_transfer import has_kv_transfer_group, kv_transfer_state

from vllm_poc.worker.model.scratch import UnsupportedModelError

if TYPE_CHECKING:
    from vllm_poc.worker.model.adapter import VllmModelRunner

# Where vLLM keeps the KV connector of its process.
_CONNECTOR = "_KV_CONNECTOR_AGENT"
# Where its load balancer of experts (EPLB) keeps whether the next pass counts: one tensor, which all layers read.
_COUNTS = "should_record_tensor"


class BaseModel:
    """A runner's model without what is chat's. UnsupportedModelError if PoC does not know how to leave that out."""

    def __init__(self, runner: VllmModelRunner) -> None:
        self._adapted = adapted_layers(runner.get_model())
        self._counts = expert_counts(runner)
        require_known_connector()

    @property
    def counts_experts(self) -> bool:
        """Whether vLLM counts how many tokens each expert has."""
        return self._counts is not None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let one forward pass run the base model alone; also one that is recorded in a CUDA graph.

        Layers with adapters (LoRA) apply what the last batch of chat has chosen. Meanwhile the layers within stand in
        their places, with their weights and kernels, so that results have the bits of a server without adapters. So
        they do in a CUDA graph, which would read chat's choice otherwise.

        Attention hands its keys and values to the KV connector as long as that has the orders of a batch. It may have
        them between the forward pass of a batch and its sampling, and would keep PoC's as those of chat.

        Experts are placed by how many of chat's tokens each had. PoC's tokens are not counted.
        """
        connector = getattr(kv_transfer_state, _CONNECTOR, None)
        counts = self._counts.clone() if self._counts is not None else None
        try:
            for owner, name, layer in self._adapted:
                owner._modules[name] = layer.base_layer
            setattr(kv_transfer_state, _CONNECTOR, None)
            if self._counts is not None:
                self._counts.zero_()
            yield
        finally:
            if self._counts is not None:
                self._counts.copy_(counts)
            setattr(kv_transfer_state, _CONNECTOR, connector)
            for owner, name, layer in self._adapted:
                owner._modules[name] = layer


class Adapted(NamedTuple):
    """A layer with adapters, by its name in ``owner``."""

    owner: nn.Module
    name: str
    layer: nn.Module


def adapted_layers(model: nn.Module) -> list[Adapted]:
    """Return all layers with adapters, by each name that the model has for them; none without ``--enable-lora``."""
    return [
        Adapted(owner, name, layer)
        for owner in model.modules()
        for name, layer in owner._modules.items()  # `named_children` leaves out a second name
        if layer is not None and _has_adapters(layer)
    ]


def expert_counts(runner: VllmModelRunner) -> Tensor | None:
    """Return the tensor that says whether tokens of experts are counted; None without ``--enable-eplb``.

    UnsupportedModelError if this release of vLLM has none.
    """
    if not runner.vllm_config.parallel_config.enable_eplb:
        return None
    counts = getattr(runner.eplb_state, _COUNTS, None)
    if not isinstance(counts, Tensor):
        raise UnsupportedModelError(
            "PoC does not know how to keep its tokens out of the statistics of experts in this release of vLLM: "
            "start vLLM without --enable-eplb."
        )
    return counts


def require_known_connector() -> None:
    """UnsupportedModelError if there is a KV connector, and it is not where PoC knows to hide it."""
    if has_kv_transfer_group() and getattr(kv_transfer_state, _CONNECTOR, None) is None:
        raise UnsupportedModelError(
            "PoC does not know where this release of vLLM keeps its KV connector: start vLLM without "
            "--kv-transfer-config and --kv-offloading-size."
        )


def _has_adapters(layer: nn.Module) -> bool:
    # By the names of their classes: the module that has them imports much that a server without adapters has not.
    return any(kind.__name__ == "BaseLayerWithLoRA" for kind in type(layer).__mro__)
