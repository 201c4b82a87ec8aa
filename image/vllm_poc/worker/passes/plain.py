# SPDX-License-Identifier: Apache-2.0
"""vLLM's own forward pass, with hooks that reflect each decoder layer's output, and what every pass must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor, nn

from vllm_poc.maths.sampling import reflect

if TYPE_CHECKING:
    from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter
    from vllm_poc.worker.model.scratch import BatchShape

# vLLM's layers return (hidden state, residual, ...); others return the hidden state alone.
LayerOutput: TypeAlias = Tensor | tuple[Tensor, ...]
#: Returns the reflection of rows along a vector.
Reflect: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Pass(Protocol):
    """A way to compute. ``needs_cache`` says whether its attention writes and reads a KV cache."""

    needs_cache: bool

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Describe a batch to the attention layers."""
        ...

    def workspace(self) -> object:
        """Return the memory that operations have worked in: whoever records them must keep it."""
        ...

    def applied(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> AbstractContextManager[None]:
        """Make the model compute this way while the context lasts, and reflect each layer's output along its vector.

        The forward pass returns all tokens, or the last of each sequence.
        """
        ...


class PlainPass:
    """vLLM's own forward pass, on any device, with hooks behind its layers."""

    needs_cache = True

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Describe a batch to the attention layers."""
        return self._adapter.plan(shape)

    def workspace(self) -> object:
        """Return nothing: vLLM keeps its own."""
        return None

    @contextmanager
    def applied(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> Iterator[None]:
        """Reflect each layer's output along its vector."""
        with reflected_layers(vectors):
            yield


@contextmanager
def reflected_layers(vectors: Mapping[nn.Module, Tensor], reflect: Reflect = reflect) -> Iterator[None]:
    """Reflect the output of each layer along its vector ``[hidden]`` while the context lasts.

    The hooks are gone afterwards, so chat never meets one.
    """
    with ExitStack() as stack:
        for layer, vector in vectors.items():
            stack.enter_context(layer.register_forward_hook(partial(_reflect_output, reflect, vector)))
        yield


def _reflect_output(
    reflect: Reflect, vector: Tensor, _layer: nn.Module, _inputs: object, output: LayerOutput
) -> LayerOutput:
    if isinstance(output, tuple):
        # The layer's output is a sum of the two, also where there are several copies of each; reflecting is linear.
        hidden, residual, *rest = output
        return (reflect(hidden, vector), reflect(residual, vector) if residual is not None else None, *rest)
    return reflect(output, vector)
