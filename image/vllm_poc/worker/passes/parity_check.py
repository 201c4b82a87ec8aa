# SPDX-License-Identifier: Apache-2.0
"""The parity check: before a pass is used, it must give what vLLM's own gives for small batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vllm_poc.logs import get_logger
from vllm_poc.rpc import ModelFacts, PassSpec
from vllm_poc.wire.messages import Protocol as WireProtocol
from vllm_poc.worker.model.adapter import ModelAdapter, StageInputs, StageOutput
from vllm_poc.worker.model.layer_subset import comparable, only
from vllm_poc.worker.model.scratch import BatchShape
from vllm_poc.worker.results import input_columns

_log = get_logger(__name__)

#: Sequences of a batch, and their lengths: short and long ones have other kernels.
_NONCES, _LENGTHS = 4, (64, 128)
#: Relative distance of two passes' hidden states. Rounding makes 0.02; a part that is left out or done twice, 1.
_TOLERANCE = 0.2


def parity_batches(limits: ModelFacts) -> list[BatchShape]:
    """Return the batches to compare: none is larger than what the server, and thus the scratch cache, holds."""
    tokens = limits["max_batch_tokens"]
    longest = min(tokens, limits["max_model_len"])
    lengths = sorted({min(length, longest) for length in _LENGTHS})
    return [BatchShape(min(_NONCES, limits["max_batch_nonces"], tokens // length), length) for length in lengths]


def _spec(seq_len: int) -> PassSpec:
    return PassSpec(
        WireProtocol.ARTIFACT, seq_len=seq_len, k_dim=1, strong_rng=False, layer_hooks=True, sign_flips=False
    )


class StageForward(Protocol):
    """What is needed of this rank's share of a batch."""

    @property
    def adapter(self) -> ModelAdapter:
        """The served model."""
        ...

    @property
    def limits(self) -> ModelFacts:
        """What the server allows."""
        ...

    def load(self, block_hash: str, spec: PassSpec) -> None:
        """Make what all nonces of a block hash share."""
        ...

    def inputs(self, spec: PassSpec, seeds: Tensor) -> StageInputs:
        """Return what this stage reads of the nonces with these seeds."""
        ...

    def forward(self, spec: PassSpec, inputs: StageInputs, received: dict[str, Tensor], nonces: int) -> StageOutput:
        """Return the hidden states at the last positions, or what the next stage needs."""
        ...


def hidden_states(stage: StageForward) -> list[Tensor] | None:
    """Return the hidden states of small batches, on all ranks together; none of them if another stage has them.

    None if a rank failed, and thus all that share its stage.
    """
    found = []
    for shape in parity_batches(stage.limits):
        succeeded, hidden = _through_all_stages(stage, shape)
        if not succeeded:
            return None
        found += [hidden.float()] if hidden is not None else []
    return found


def _through_all_stages(stage: StageForward, shape: BatchShape) -> tuple[bool, Tensor | None]:
    """Compute stage by stage: nobody waits for what a stage that failed would have sent."""
    ranks, output = stage.adapter.ranks, None
    for turn in range(ranks.stages):
        if isinstance(output, dict):
            ranks.send(output)
            output = None
        mine = ranks.stage == turn
        if mine:
            output = _output(stage, shape, ranks.receive())
        # Before anything waits for the device, where another rank may have left this one within a collective.
        if not ranks.in_step((output is not None) if mine else None):
            return False, None
    return True, output if isinstance(output, Tensor) else None


def _output(stage: StageForward, shape: BatchShape, received: dict[str, Tensor]) -> StageOutput | None:
    try:
        with torch.inference_mode():
            spec = _spec(shape.seq_len)
            stage.load("parity check", spec)
            seeds = torch.arange(shape.nonces * (input_columns(spec) + 1), device=stage.adapter.device)
            inputs = stage.inputs(spec, seeds.view(shape.nonces, -1))
            with only(stage.adapter, comparable(stage.adapter)):
                return stage.forward(spec, inputs, received, shape.nonces)
    except Exception:
        _log.exception("a small batch of PoC fails here; PoC computes without operations that fail")
        return None


class SeenLayer(NamedTuple):
    """What a layer read, and the tensors that it made, ``[tokens, ...]`` each."""

    read: tuple[Any, ...]
    made: list[Tensor]


def seen_layers(stage: StageForward) -> list[list[SeenLayer]] | None:
    """Return what the first few layers read and make in small batches, on all ranks together; None if one failed."""
    found = []
    for shape in parity_batches(stage.limits):
        with _seen(_first_layers(stage)) as seen:
            succeeded, _ = _through_all_stages(stage, shape)
        if not succeeded:
            return None
        found.append(seen)
    return found


def layer_differences(stage: StageForward, expected: Sequence[Sequence[SeenLayer]]) -> list[float] | None:
    """Return the relative distances of what these layers make here of what they read there; None if a rank failed.

    A difference is then the layer's alone. Behind several layers some tokens are at other experts for a last bit.
    """
    found = list[float]()
    for shape, seen in zip(parity_batches(stage.limits), expected, strict=True):
        with _fed(_first_layers(stage), seen) as distances:
            succeeded, _ = _through_all_stages(stage, shape)
        if not succeeded:
            return None
        found += distances
    return found


def _first_layers(stage: StageForward) -> list[nn.Module]:
    return [stage.adapter.own_layers[number] for number in comparable(stage.adapter)]


@contextmanager
def _seen(layers: Sequence[nn.Module]) -> Iterator[list[SeenLayer]]:
    found: list[SeenLayer] = []

    def begin(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.append(SeenLayer(_cloned(inputs), []))

    def end(_: nn.Module, _inputs: object, output: object) -> None:
        found[-1].made.extend(_cloned(_tensors(output)))

    with _hooked(layers, lambda _: begin, lambda _: end):
        yield found


@contextmanager
def _fed(layers: Sequence[nn.Module], seen: Sequence[SeenLayer]) -> Iterator[list[float]]:
    found: list[float] = []

    def begin(number: int, _: nn.Module, _inputs: object) -> tuple[Any, ...]:
        return _cloned(seen[number].read)

    def end(number: int, _: nn.Module, _inputs: object, output: object) -> None:
        found.append(max(differences(_tensors(output), seen[number].made)))

    with _hooked(layers, lambda number: partial(begin, number), lambda number: partial(end, number)):
        yield found


@contextmanager
def _hooked(
    layers: Sequence[nn.Module], begin: Callable[[int], Callable[..., Any]], end: Callable[[int], Callable[..., Any]]
) -> Iterator[None]:
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_pre_hook(begin(number)))
            stack.enter_context(layer.register_forward_hook(end(number)))
        yield


def _tensors(output: object) -> tuple[Tensor, ...]:
    made = output if isinstance(output, tuple) else (output,)
    return tuple(part.float() for part in made if isinstance(part, Tensor))


def _cloned(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)


def differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the relative distances of hidden states; NaN where they are not finite."""
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


def is_equal(distances: Sequence[float]) -> bool:
    """Whether two passes with these `differences` compute the same, as far as rounding allows."""
    return all(distance <= _TOLERANCE for distance in distances)  # NaN is not
