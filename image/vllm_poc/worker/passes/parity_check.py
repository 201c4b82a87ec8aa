# SPDX-License-Identifier: Apache-2.0
"""The parity check: before a pass is used, it must give what vLLM's own gives for small batches.

Two things are compared for each batch: the hidden states behind all layers, and what one attention layer of each kind
makes of the same queries, keys and values. The first finds what is wrong anywhere; the second also what shows little
behind the residual stream, such as tokens beyond a window.

Lengths go beyond each sliding window, attention chunk and block of this server's caches, as far as its own limits
allow. All of it has one deadline, after which no batch is begun, and what was not compared by then is not used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vllm_poc.logs import get_logger
from vllm_poc.rpc import ModelFacts, PassSpec
from vllm_poc.wire.messages import Protocol as WireProtocol
from vllm_poc.worker.model.adapter import ModelAdapter, StageInputs, StageOutput
from vllm_poc.worker.model.layer_subset import comparable, has_streams, only, stands_alone
from vllm_poc.worker.model.ranks import lacks_memory
from vllm_poc.worker.model.scratch import BatchShape
from vllm_poc.worker.results import input_columns

_log = get_logger(__name__)

#: Seconds after which no further batch is begun, unless the server says otherwise. One batch is at most as large as
#: chat's largest.
SECONDS = 60.0
_NO_ROOM = "the GPU has no room for PoC's small batches: start vLLM with a lower --gpu-memory-utilization"
#: Lengths of sequences, beside those beyond borders: short and long ones have other kernels.
_LENGTHS = (64, 128)
#: Sequences of a batch, fewer if they have more tokens than `_MANY`: at least two besides one that may be at other
#: experts, so that one of them does not come first.
_NONCES, _FEW_NONCES, _MANY = 4, 3, 512
#: Relative distance of hidden states, in units of the dtype's epsilon. Rounding makes 3 of them (0.02 in bfloat16); a
#: part that is left out or done twice, 128.
_EPSILONS_OF_MODEL = 26
#: The same for the outputs of one attention layer at each token. Rounding makes 1; other tokens, 50 and more.
_EPSILONS_OF_ATTENTION = 8
#: Where the last bit of a sum sends a token to other experts: how many times as far all sequences together may be, if
#: there are so many. One of four with other experts makes 1 (0.21 in bfloat16); one that is wrong, 2.5.
_WITH_OTHER_EXPERTS = 2
_LEAST_SEQUENCES = 3
#: How many batches of a shape, with other nonces each, may be compared there until one is equal. One sequence in five
#: was at other experts behind the first layers of DeepSeek-V4, and thus two of four in a batch of six.
TRIES = 4


def parity_batches(limits: ModelFacts, borders: Collection[int] = ()) -> list[BatchShape]:
    """Return the batches to compare: none is larger than what the server, and thus the scratch cache, holds.

    Their sequences are twice as long as each of the ``borders``, so that half of the tokens are beyond it.
    """
    tokens = limits["max_batch_tokens"]
    longest = min(tokens, limits["max_model_len"])
    lengths = sorted({min(length, longest) for length in (*_LENGTHS, *(2 * border + 1 for border in borders))})
    return [BatchShape(_nonces(limits, length), length) for length in lengths]


def _nonces(limits: ModelFacts, length: int) -> int:
    most = _NONCES if length <= _MANY else _FEW_NONCES
    return min(most, limits["max_batch_nonces"], limits["max_batch_tokens"] // length)


class Tolerances(NamedTuple):
    """Largest relative distances of two passes that compute the same."""

    model: float
    attention: float

    @classmethod
    def of(cls, dtype: torch.dtype, *, quantised: bool) -> Tolerances:
        """Return those of a dtype. What rounds to 8 bits or less in between is as far apart as bfloat16."""
        # Matrix products on a GPU round to no less than these, whatever the dtype.
        epsilon = max(torch.finfo(dtype).eps, torch.finfo(torch.bfloat16 if quantised else torch.float16).eps)
        return cls(_EPSILONS_OF_MODEL * epsilon, _EPSILONS_OF_ATTENTION * epsilon)


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

    def dry_run(self, spec: PassSpec, seeds: Tensor) -> Exception | None:
        """Run the forward pass of these seeds without other ranks, and return what went wrong."""
        ...

    def inputs(self, spec: PassSpec, seeds: Tensor) -> StageInputs:
        """Return what this stage reads of the nonces with these seeds."""
        ...

    def forward(self, spec: PassSpec, inputs: StageInputs, received: dict[str, Tensor], nonces: int) -> StageOutput:
        """Return the hidden states at the last positions, or what the next stage needs."""
        ...


class Deadline:
    """When no further batch is begun, as all ranks see it."""

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def passed(self, stage: StageForward) -> bool:
        """Wait for all ranks, and say whether it has passed for one."""
        return not stage.adapter.ranks.agreed(self._clock() < self._end)


def hidden_states(
    stage: StageForward, deadline: Deadline | None = None, done: list[BatchShape] | None = None
) -> list[Tensor] | None:
    """Return the hidden states of small batches, on all ranks together; none of them if another stage has them.

    None if a rank failed, and thus all; MemoryError on all if one lacks memory, and nothing else is wrong. Those that
    come after the deadline are left out; ``done`` gets the others.
    """
    found: list[Tensor] = []
    until = deadline or Deadline()
    for number, shape in enumerate(parity_batches(stage.limits, stage.adapter.borders)):
        if number and until.passed(stage):  # which all ranks ask together
            return found
        succeeded, hidden = _through_all_stages(stage, shape)
        if not succeeded:
            return None
        found += [hidden.float()] if hidden is not None else []
        if done is not None:
            done.append(shape)
    return found


def _through_all_stages(stage: StageForward, shape: BatchShape, attempt: int = 0) -> tuple[bool, Tensor | None]:
    """Compute stage by stage: nobody waits for what a stage that failed would have sent. MemoryError on all ranks.

    Each ``attempt`` has other nonces.
    """
    ranks = stage.adapter.ranks
    output: StageOutput | Exception | None = None
    if not _runs_dry(stage, shape):
        return False, None
    for turn in range(ranks.stages):
        if isinstance(output, dict):
            ranks.send(output)
            output = None
        mine = ranks.stage == turn
        if mine:
            output = _output(stage, shape, ranks.receive(), attempt)
        failed = isinstance(output, Exception)
        # Before anything waits for the device, where another rank may have left this one within a collective.
        if not ranks.in_step(not failed if mine else None):
            if ranks.agreed(not failed or lacks_memory(output)):
                raise MemoryError(_NO_ROOM)
            return False, None
    return True, output if isinstance(output, Tensor) else None


def _runs_dry(stage: StageForward, shape: BatchShape) -> bool:
    """Whether the batch runs on each rank alone: one that fails among others would leave them within a collective.

    MemoryError on all ranks if one lacks memory, and nothing else is wrong.
    """
    ranks = stage.adapter.ranks
    if ranks.alone:
        return True
    try:
        fits = ranks.all_fit(_dry_error(stage, shape))
    except Exception:  # which is in the log of its rank
        return False
    if not fits:
        raise MemoryError(_NO_ROOM)
    return True


def _dry_error(stage: StageForward, shape: BatchShape) -> Exception | None:
    try:
        spec, seeds = _prepared(stage, shape)
        return stage.dry_run(spec, seeds)
    except Exception as error:
        _log.exception("a small batch of PoC cannot be prepared here")
        return error


def _prepared(stage: StageForward, shape: BatchShape, attempt: int = 0) -> tuple[PassSpec, Tensor]:
    spec = _spec(shape.seq_len)
    with torch.inference_mode():
        stage.load("parity check", spec)
    count = shape.nonces * (input_columns(spec) + 1)
    seeds = torch.arange(attempt * count, (attempt + 1) * count, device=stage.adapter.device)
    return spec, seeds.view(shape.nonces, -1)


def _output(
    stage: StageForward, shape: BatchShape, received: dict[str, Tensor], attempt: int = 0
) -> StageOutput | Exception:
    try:
        spec, seeds = _prepared(stage, shape, attempt)
        with torch.inference_mode():
            inputs = stage.inputs(spec, seeds)
            with only(stage.adapter, comparable(stage.adapter)):
                return stage.forward(spec, inputs, received, shape.nonces)
    except Exception as error:
        _log.exception("a small batch of PoC fails here; PoC computes without operations that fail")
        return error


class Comparison(NamedTuple):
    """How far two passes are apart for one batch, on this rank: relative distances, NaN where one is not finite.

    ``model`` are those of the hidden states, ``layers`` those of single layers with the same input, ``attention`` those
    of single attention layers, of the token that is furthest apart.
    """

    model: list[float]
    layers: list[float]
    attention: list[float]

    def may_be_chance(self, tolerances: Tolerances) -> bool:
        """Whether other experts may be why hidden states differ: attention is compared with the same inputs."""
        finite = all(map(math.isfinite, (*self.model, *self.layers)))
        return finite and all(distance <= tolerances.attention for distance in self.attention)

    def is_equal(self, tolerances: Tolerances) -> bool:
        """Whether both compute the same, as far as rounding allows."""
        whole = all(distance <= tolerances.model for distance in (*self.model, *self.layers))  # NaN is not
        return whole and all(distance <= tolerances.attention for distance in self.attention)


def hangs_on_a_bit(adapter: ModelAdapter) -> bool:
    """Whether the last bit of a sum may send tokens to other experts behind the layers that are compared together.

    Then a batch with other nonces tells more: what is wrong is so with them, too.
    """
    return has_streams(adapter) and not stands_alone(adapter)


def compare(
    plain: StageForward, fused: StageForward, shape: BatchShape, found: Tensor | None, attempt: int = 0
) -> Comparison | None:
    """Compare ``found``, the hidden states of a batch by the fused pass, and what modules make of the same input.

    Another ``attempt`` than the first has other nonces, and computes what it compares.

    None if a rank failed, and MemoryError as from `hidden_states`. Where layers can be called one by one, they are
    compared so: behind several, some tokens are at other experts for a last bit.
    """
    one_by_one = stands_alone(plain.adapter)
    modules = _first_layers(plain) if one_by_one else _attention_kinds(plain)
    succeeded, found = _through_all_stages(fused, shape, attempt) if attempt else (True, found)
    # Before anything looks at what modules make.
    if not (succeeded and _runs_dry(plain, shape) and _runs_dry(fused, shape)):
        return None
    with _seen(modules) as seen:
        succeeded, expected = _through_all_stages(plain, shape, attempt)
    if not succeeded:
        return None
    with _fed(modules, seen, differences if one_by_one else token_differences) as distances:
        succeeded, _ = _through_all_stages(fused, shape, attempt)
    if not succeeded:
        return None
    distances += [math.nan] * (len(seen) - len(distances))  # which the pass went around
    if one_by_one:
        return Comparison([], distances, [])
    if found is None or expected is None:
        return Comparison([], [], distances)
    between = differences_but_one if has_streams(plain.adapter) else differences
    return Comparison(between([found.float()], [expected.float()]), [], distances)


def _first_layers(stage: StageForward) -> list[nn.Module]:
    return [stage.adapter.own_layers[number] for number in comparable(stage.adapter)]


def _attention_kinds(stage: StageForward) -> list[nn.Module]:
    """Return one attention layer of each class and window: the first, before which least is rounded."""
    kinds: dict[object, nn.Module] = {}
    for layer in stage.adapter.attention_modules:
        impl = getattr(layer, "impl", None)
        kinds.setdefault((type(layer), type(impl), str(getattr(impl, "sliding_window", None))), layer)
    return list(kinds.values())


class SeenModule(NamedTuple):
    """What a module read, and the tensors that it made, ``[tokens, ...]`` each."""

    read: tuple[Any, ...]
    made: list[Tensor]


@contextmanager
def _seen(modules: Sequence[nn.Module]) -> Iterator[dict[int, SeenModule]]:
    found: dict[int, SeenModule] = {}

    def begin(number: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        found[number] = SeenModule(_cloned(inputs), [])

    def end(number: int, _: nn.Module, _inputs: object, output: object) -> None:
        found[number].made.extend(_cloned(_tensors(output)))

    with _hooked(modules, lambda number: partial(begin, number), lambda number: partial(end, number)):
        yield found


@contextmanager
def _fed(
    modules: Sequence[nn.Module],
    seen: dict[int, SeenModule],
    distances: Callable[[Sequence[Tensor], Sequence[Tensor]], list[float]],
) -> Iterator[list[float]]:
    found: list[float] = []

    def begin(number: int, _: nn.Module, _inputs: object) -> tuple[Any, ...]:
        return _cloned(seen[number].read)

    def end(number: int, _: nn.Module, _inputs: object, output: object) -> None:
        found.append(max(distances(_tensors(output), seen[number].made)))

    with _hooked(modules, lambda number: partial(begin, number), lambda number: partial(end, number)):
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


def differences_but_one(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return relative distances of ``[sequences, ...]``, one of which may be at other experts for a last bit.

    Of each: that within which all but one are, and a share of that of all together. Too few are compared as all others.
    """
    if any(len(one) < _LEAST_SEQUENCES for one in found):
        return differences(found, expected)
    whole = [distance / _WITH_OTHER_EXPERTS for distance in differences(found, expected)]
    apart = [_row_distances(one, other) for one, other in zip(found, expected, strict=True)]
    return whole + [float(distances.kthvalue(len(distances) - 1).values) for distances in apart]


def token_differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the largest relative distances of a token; NaN where one is not finite."""
    return [float(_row_distances(one, other).max()) for one, other in zip(found, expected, strict=True)]


def _row_distances(found: Tensor, expected: Tensor) -> Tensor:
    """Return the relative distance of each row, ``[rows]``."""
    one, other = found.flatten(1), expected.flatten(1)
    least = torch.finfo(torch.float32).tiny  # of rows that are nothing but zeros
    return (one - other).norm(dim=1) / other.norm(dim=1).clamp_min(least)
