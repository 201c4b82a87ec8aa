# SPDX-License-Identifier: Apache-2.0
"""Layer hooks: a PoC forward pass reflects each decoder layer's output along the round's vector."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from torch import Tensor, nn

from vllm_poc.maths.reflections import reflect

# vLLM's layers return (hidden state, residual, ...); others return the hidden state alone.
LayerOutput: TypeAlias = Tensor | tuple[Tensor, ...]


@contextmanager
def reflected_layers(layers: Sequence[nn.Module], vectors: Tensor) -> Iterator[None]:
    """Reflect the output of layer i along ``vectors[i]`` while the context lasts.

    ``vectors`` is ``[len(layers), hidden]``. The hooks are gone afterwards, so chat never meets one.
    """
    with ExitStack() as stack:
        for layer, vector in zip(layers, vectors, strict=True):
            stack.enter_context(_hook(layer, vector))
        yield


@contextmanager
def _hook(layer: nn.Module, vector: Tensor) -> Iterator[None]:
    handle = layer.register_forward_hook(lambda _module, _inputs, output: _reflect_output(output, vector))
    try:
        yield
    finally:
        handle.remove()


def _reflect_output(output: LayerOutput, vector: Tensor) -> LayerOutput:
    if isinstance(output, tuple):
        # The layer's output is the sum of the two, and reflecting is linear.
        hidden, residual, *rest = output
        return (reflect(hidden, vector), reflect(residual, vector), *rest)
    return reflect(output, vector)
