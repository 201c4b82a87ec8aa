# SPDX-License-Identifier: Apache-2.0
"""vLLM's own forward pass, with hooks that reflect each decoder layer's output, and what every pass must do.

In the decode scheme, hooks also replace what routers say of each token. vLLM's own code makes weights of their logits,
as it does for chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn

from vllm_poc.maths.decode import route_logits
from vllm_poc.maths.sampling import reflect

if TYPE_CHECKING:
    from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter
    from vllm_poc.worker.model.scratch import BatchShape

# vLLM's layers return (hidden state, residual, ...); others return the hidden state alone.
LayerOutput: TypeAlias = Tensor | tuple[Tensor, ...]
#: Returns the reflection of rows along a vector.
Reflect: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Router(NamedTuple):
    """What says for each token which of ``experts`` compute it: the ``top_k`` with the largest logits."""

    gate: nn.Module
    experts: int
    top_k: int


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


def find_routers(layers: Iterable[nn.Module], experts: int, top_k: int) -> list[Router]:
    """Return the routers of the layers, in their order: the gate of the first part with both a gate and experts.

    Dense layers have none. ``experts`` are those of all ranks, by the model's configuration.
    """
    gates = (next(filter(None, map(_gate, layer.modules())), None) for layer in layers)
    return [Router(gate, experts, top_k) for gate in gates if gate is not None]


@contextmanager
def seeded_routers(routers: Sequence[Router], starts: Sequence[Tensor], tokens: int) -> Iterator[None]:
    """Let one forward pass choose experts by seeds while the context lasts.

    ``starts`` has int64 ``[nonces]`` for each router, the first experts of the nonces (`route_starts`). Each nonce has
    ``tokens`` tokens. RuntimeError if a router was not asked exactly once: its experts would be the model's own choice.
    """
    asked = [0] * len(routers)

    def replace(number: int, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        asked[number] += 1
        logits, *rest = output if isinstance(output, tuple) else (output,)
        router = routers[number]
        seeded = route_logits(starts[number], experts=router.experts, top_k=router.top_k, dtype=logits.dtype)
        seeded = seeded.repeat_interleave(tokens, dim=0)
        if seeded.shape != logits.shape:
            raise RuntimeError(f"a router gave logits {tuple(logits.shape)} instead of {tuple(seeded.shape)}")
        return (seeded, *rest) if isinstance(output, tuple) else seeded

    with ExitStack() as stack:
        for number, router in enumerate(routers):
            stack.enter_context(
                router.gate.register_forward_hook(lambda _, _inputs, output, number=number: replace(number, output))
            )
        yield
    if any(count != 1 for count in asked):
        raise RuntimeError(f"routers were asked {asked} times in a forward pass, not once each")


def _reflect_output(
    reflect: Reflect, vector: Tensor, _layer: nn.Module, _inputs: object, output: LayerOutput
) -> LayerOutput:
    if isinstance(output, tuple):
        # The layer's output is a sum of the two, also where there are several copies of each; reflecting is linear.
        hidden, residual, *rest = output
        return (reflect(hidden, vector), reflect(residual, vector) if residual is not None else None, *rest)
    return reflect(output, vector)


def _gate(part: nn.Module) -> nn.Module | None:
    gate = getattr(part, "gate", None)
    return gate if isinstance(gate, nn.Module) and isinstance(getattr(part, "experts", None), nn.Module) else None
