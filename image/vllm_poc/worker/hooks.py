# SPDX-License-Identifier: Apache-2.0
"""Layer hooks: a PoC forward pass reflects each decoder layer's output along the round's vector."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
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
            stack.enter_context(layer.register_forward_hook(partial(_reflect_output, vector)))
        yield


def _reflect_output(vector: Tensor, _layer: nn.Module, _inputs: object, output: LayerOutput) -> LayerOutput:
    if isinstance(output, tuple):
        # The layer's output is the sum of the two, and reflecting is linear.
        hidden, residual, *rest = output
        return (reflect(hidden, vector), reflect(residual, vector), *rest)
    return reflect(output, vector)
