# SPDX-License-Identifier: Apache-2.0
"""vLLM's own forward pass, with hooks that reflect each decoder layer's output, and what every pass must do.

In the decode scheme, what routers say of each token is replaced, too. vLLM's own code makes weights of their logits, as
it does for chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from vllm_poc.maths.sampling import reflect

if TYPE_CHECKING:
    from vllm_poc.worker.model.adapter import AttentionPlan, ModelAdapter
    from vllm_poc.worker.model.scratch import BatchShape

#: What a router has that chooses experts by token id: a table of them, for each id.
_EXPERT_TABLE = "tid2eid"
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

    def continuing(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> AbstractContextManager[None]:
        """Do the same where sequences go on from what a cache holds. The forward pass returns all tokens."""
        ...


class Patch(NamedTuple):
    """``owner.name`` is to be ``value``; also in place of a method of the owner's class."""

    owner: object
    name: str
    value: Any


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply patches while the context lasts. Chat, which runs between, never meets one."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    missing = object()
    try:
        for owner, name, value in patches:
            attributes = vars(owner)
            undo.append((attributes, name, attributes.get(name, missing)))
            attributes[name] = value
        yield
    finally:
        for attributes, name, before in reversed(undo):
            if before is missing:
                del attributes[name]
            else:
                attributes[name] = before


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

    def continuing(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> AbstractContextManager[None]:
        """Do the same: vLLM's own pass always has a cache."""
        return reflected_layers(vectors)


@contextmanager
def reflected_layers(vectors: Mapping[nn.Module, Tensor], reflect: Reflect = reflect) -> Iterator[None]:
    """Reflect the output of each layer along its vector ``[hidden]`` while the context lasts.

    The hooks are gone afterwards, so chat never meets one.
    """
    with ExitStack() as stack:
        for layer, vector in vectors.items():
            stack.enter_context(layer.register_forward_hook(partial(_reflect_output, reflect, vector)))
        yield


def find_routers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the routers of the layers, in their order: the gate of the first part with both a gate and experts.

    Dense layers have none, and routers that choose experts by token id are left out.
    """
    gates = (next(filter(None, map(_gate, layer.modules())), None) for layer in layers)
    return [gate for gate in gates if gate is not None and getattr(gate, _EXPERT_TABLE, None) is None]


class SeededRouters:
    """Routers whose logits are made of seeds. They choose ``top_k`` of ``experts``, which are those of all ranks.

    Their own answer is asked for once alone, to learn its form.
    """

    def __init__(self, routers: Sequence[nn.Module], experts: int, top_k: int) -> None:
        self.routers = routers
        self.experts = experts
        self.top_k = top_k
        self._forms: list[_Logits | None] = [None] * len(routers)

    @contextmanager
    def choosing(self, logits: Tensor, tokens: int) -> Iterator[None]:
        """Let one forward pass choose experts by ``logits`` while the context lasts. Errors as of `asked_once`.

        ``logits`` are float32 ``[routers, nonces, experts]``, of nonces with so many ``tokens`` each.
        """
        asked = self.unasked()
        with self.choosing_in_part(logits, tokens, asked):
            yield
        asked_once(asked)

    def unasked(self) -> list[int]:
        """Return how many times each router has been asked when a forward pass begins."""
        return [0] * len(self.routers)

    @contextmanager
    def choosing_in_part(self, logits: Tensor, tokens: int, asked: list[int]) -> Iterator[None]:
        """Do as `choosing` for a part of a forward pass, and add to how many times each router has been ``asked``."""

        def answer(number: int, own: Callable[..., _Answer], *args: object, **options: object) -> _Answer:
            asked[number] += 1
            seeded = logits[number].repeat_interleave(tokens, dim=0) if tokens > 1 else logits[number]
            form = self._forms[number] or _Logits.of(own(*args, **options), seeded)
            self._forms[number] = form
            return form.answer(seeded)

        with patched(
            Patch(router, "forward", partial(answer, number, router.forward))
            for number, router in enumerate(self.routers)
        ):
            yield


def asked_once(asked: Sequence[int]) -> None:
    """Raise RuntimeError if a router was not asked exactly once: its experts would be the model's own choice."""
    if any(count != 1 for count in asked):
        raise RuntimeError(f"routers were asked {asked} times in a forward pass, not once each")


#: What a router returns: logits, or these and others.
_Answer: TypeAlias = Tensor | tuple[Tensor, ...]


class _Logits(NamedTuple):
    """The form of a router's answer: the type of its logits, and what follows them in a tuple; None if it is none."""

    dtype: torch.dtype
    others: tuple[Tensor, ...] | None

    @classmethod
    def of(cls, output: _Answer, seeded: Tensor) -> _Logits:
        """Return the form of a router's own answer. RuntimeError if it is of other tokens or experts than seeded."""
        logits, *others = output if isinstance(output, tuple) else (output,)
        if any(other is not None for other in others) or logits.shape != seeded.shape:
            raise RuntimeError(f"a router gave logits {tuple(logits.shape)} instead of {tuple(seeded.shape)}")
        return cls(logits.dtype, tuple(others) if isinstance(output, tuple) else None)

    def answer(self, logits: Tensor) -> _Answer:
        """Return logits in this form."""
        logits = logits.to(self.dtype)
        return logits if self.others is None else (logits, *self.others)


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
