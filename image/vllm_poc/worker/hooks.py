# SPDX-License-Identifier: Apache-2.0
"""Layer hooks: a PoC forward pass reflects each decoder layer's output along the round's vector."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from vllm_poc.maths.reflections import reflect

# vLLM's layers return (hidden state, residual, ...); others return the hidden state alone.
LayerOutput: TypeAlias = Tensor | tuple[Tensor, ...]
#: Returns the reflection of rows along a vector.
Reflect: TypeAlias = Callable[[Tensor, Tensor], Tensor]


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
        # The layer's output is the sum of the two, and reflecting is linear.
        hidden, residual, *rest = output
        return (reflect(hidden, vector), reflect(residual, vector), *rest)
    return reflect(output, vector)
