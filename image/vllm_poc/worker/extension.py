# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM mixes into its worker (``--worker-extension-cls``), and its choice of a pass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from vllm_poc.logs import get_logger
from vllm_poc.rpc import (
    BatchRequest,
    BatchResult,
    DecodeFacts,
    DecodeRequest,
    DecodeResult,
    DecodeSetup,
    Failure,
    ModelFacts,
    PassFields,
    PassSpec,
    PassTiming,
    no_chains,
)
from vllm_poc.start_checks import check_start
from vllm_poc.worker.chain_trial import tried
from vllm_poc.worker.decoding import Decoder
from vllm_poc.worker.model.adapter import ModelAdapter
from vllm_poc.worker.model.capabilities import (
    fused_facts,
    model_facts,
    needs_vllms_operations,
    refusal,
    unproven,
)
from vllm_poc.worker.model.ranks import OtherRankError, Ranks, lacks_memory
from vllm_poc.worker.model.scratch import BatchShape, UnsupportedModelError
from vllm_poc.worker.model_runner import PocModelRunner, Slower, Stage
from vllm_poc.worker.passes.parity_check import (
    SECONDS,
    TRIES,
    Deadline,
    StageForward,
    Tolerances,
    compare,
    hangs_on_a_bit,
    hidden_states,
    parity_batches,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_poc.worker.model.adapter import VllmModelRunner

check_start()

_log = get_logger(__name__)

#: Tensors that are named in a refusal.
_NAMED = 3
_SLOWER = "PoC computes with vLLM's own operations, and slower,"

T = TypeVar("T")


class PocWorkerExtension:
    """PoC methods of a worker, called by name through ``AsyncLLM.collective_rpc``.

    vLLM refuses an extension that shares a name with its worker, hence the prefix.
    """

    model_runner: VllmModelRunner  # of vLLM's worker
    _poc_model_runner: PocModelRunner | None = None
    _poc_decoder: Decoder | None = None
    #: Why PoC must not run here any more, as the parity check found.
    _poc_harm: str | None = None
    #: What a look at the model may take.
    _poc_seconds: float = SECONDS
    #: Whether a model is refused whose results have not been compared in full. Tests and benchmarks compare them.
    _poc_refuses_unproven = True

    def poc_describe(self, seconds: float = SECONDS) -> ModelFacts | Failure:
        """Say what the model allows; the first call allocates the scratch cache, and computes small batches.

        After so many ``seconds`` it begins no further batch. A pass that was chosen since the faster one found no room,
        or no time, is compared again.
        """
        self._poc_seconds = seconds
        return _answer(self._poc_facts)

    def poc_forget(self) -> dict[str, bool]:
        """Drop what was made of the model's weights, and what was captured; the next call makes it anew."""
        self._poc_drop_decoder()
        self._poc_model_runner = self._poc_harm = None
        return {"forgotten": True}  # None is the answer of ranks that have nothing to say

    def poc_rest(self) -> dict[str, bool] | Failure:
        """Wait until the device has done all that it was given.

        An answer leaves the next step on a GPU, and not every release waits for that before it gives memory away.
        """

        def rest() -> dict[str, bool]:
            device = torch.device(self.model_runner.device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return {"rests": True}

        return _answer(rest)

    def poc_compute(self, request: BatchRequest) -> BatchResult | Failure | None:
        """Compute the request together with all other ranks."""
        return _answer(lambda: self._poc_together(lambda runner: runner.prepare(request)))

    def poc_warm_up(
        self, request: BatchRequest, segment_seconds: float, keep: Collection[PassFields] = ()
    ) -> PassTiming | Failure:
        """Ready forward passes of as many nonces as the request has, together with all other ranks.

        On a GPU in segments of up to ``segment_seconds``, if one takes longer. Of the passes captured before, those of
        the specifications ``keep`` stay.
        """

        def warm_up() -> PassTiming:
            kept = {PassSpec.of(fields) for fields in keep}
            return self._poc_together(lambda runner: runner.prepare_warm_up(request, segment_seconds, kept))

        return _answer(warm_up)

    def poc_prepare_decode(self, setup: DecodeSetup) -> DecodeFacts | Failure:
        """Set memory aside for the decode scheme, and say what it allows, or why it cannot run here."""
        return _answer(lambda: self._poc_decode_facts(setup))

    def poc_decode(self, request: DecodeRequest) -> DecodeResult | Failure | None:
        """Do the next forward passes of the request's chains."""

        def decode() -> DecodeResult | None:
            if self._poc_decoder is None:
                raise UnsupportedModelError("The decode scheme was not prepared on this worker: prepare it first.")
            return self._poc_decoder.run(request)

        return _answer(decode)

    def _poc_decode_facts(self, setup: DecodeSetup) -> DecodeFacts:
        self._poc_drop_decoder()  # whose memory is free for the next
        try:
            new = self._poc_new_decoder
            self._poc_decoder = self._poc_together(lambda runner: partial(tried, new(runner.stage, setup)))
        except (UnsupportedModelError, OtherRankError) as error:
            reason = str(error) if isinstance(error, UnsupportedModelError) else None  # the other rank says why
            return no_chains(reason)
        return self._poc_decoder.facts

    def _poc_drop_decoder(self) -> None:
        if self._poc_decoder is not None:
            self._poc_decoder.forget()  # or a pass that is under way would wait for ever
        self._poc_decoder = None

    def _poc_new_decoder(self, stage: Stage, setup: DecodeSetup) -> Decoder:
        return Decoder(stage.adapter, stage.limits, setup, stage.pass_, proven=self._poc_refuses_unproven)

    def _poc_facts(self) -> ModelFacts:
        known = self._poc_model_runner
        try:
            if known is not None and known.slower is not None and known.slower.passes:
                self._poc_look(known)
            return self._poc().facts
        except UnsupportedModelError as error:
            return {**model_facts(self.model_runner.vllm_config), "refusal": str(error)}
        except OtherRankError:  # which says why
            return model_facts(self.model_runner.vllm_config)

    def _poc_together(self, prepare: Callable[[PocModelRunner], Callable[[], T]]) -> T:
        return self._poc_prepared(lambda: prepare(self._poc()))()

    def _poc(self) -> PocModelRunner:
        if self._poc_model_runner is None:
            if self._poc_harm is not None:
                raise UnsupportedModelError(self._poc_harm)
            return self._poc_look(self._poc_prepared(self._poc_plain)())
        return self._poc_model_runner

    def _poc_look(self, plain: PocModelRunner) -> PocModelRunner:
        # What lacks memory is no harm: nothing is remembered of it, and the next look may find some.
        try:
            self._poc_model_runner = harmless(plain, Deadline(self._poc_seconds))
        except UnsupportedModelError as error:
            self._poc_model_runner, self._poc_harm = None, str(error)
            raise
        return self._poc_model_runner

    def _poc_plain(self) -> Callable[[], PocModelRunner]:
        config = self.model_runner.vllm_config
        reason = refusal(config, self.model_runner.get_model())
        if reason is None and self._poc_refuses_unproven:
            reason = unproven(config)
        if reason is not None:
            raise UnsupportedModelError(reason)
        adapter = ModelAdapter(self.model_runner, getattr(self, "peak_activation_memory", 0))  # measured on GPUs alone
        plain = PocModelRunner(adapter, model_facts(config))
        return lambda: plain

    def _poc_prepared(self, prepare: Callable[[], Callable[[], T]]) -> Callable[[], T]:
        """Do what a rank can do alone; OtherRankError if another one fails in that."""
        ranks = Ranks()
        try:
            prepared = prepare()
        except Exception:
            ranks.agree(ready=False)
            raise
        ranks.agree(ready=True)
        return prepared


def harmless(plain: PocModelRunner, deadline: Deadline | None = None) -> PocModelRunner:
    """Return the runner that `fastest` chooses, by the deadline. What is found out is added to the runner's findings.

    Nothing of chat runs meanwhile, since vLLM's worker does one thing after the other. UnsupportedModelError if no pass
    works, or one changes what chat keeps; MemoryError if there is no room for any.
    """
    adapter, until = plain.stage.adapter, deadline or Deadline()
    chat = adapter.chat_memory
    before = chat.held()
    done: list[BatchShape] = []
    plain.findings.clear()  # of a look before
    if hidden_states(plain.stage, until, done) is None:
        raise UnsupportedModelError(
            "PoC's forward pass fails on this server, and the worker's log says how: serve another model."
        )
    runner = fastest(plain, until)
    changed = chat.changes(before, plain.stage.scratch_storages | runner.stage.scratch_storages)
    if not adapter.ranks.agreed(not changed):
        named = ", ".join(changed[:_NAMED]) or "on another rank"
        raise UnsupportedModelError(
            f"PoC's forward pass changes what chat's attention holds here ({named}): "
            "restart vLLM with another --attention-backend."
        )
    runner.findings.append(
        f"PoC left chat's KV cache and what attention holds as they were, in batches of {_in_words(done)} tokens."
    )
    left_out = _batches(plain)[len(done) :]
    if left_out:
        runner.findings.append(f"There was no time for batches of {_in_words(left_out)} tokens.")
    return runner


def fastest(plain: PocModelRunner, deadline: Deadline | None = None) -> PocModelRunner:
    """Return a runner with the fused pass, if that passes the parity check, or ``plain``; the same on all ranks.

    On a GPU, runs small batches with both, by the deadline. ``plain`` then says why it is slower.
    """
    adapter = plain.stage.adapter
    if not adapter.ranks.agreed(_may_fuse(adapter)):
        plain.findings.append("PoC computes with vLLM's own operations: it has no others for this device or attention.")
        return plain
    fused = None
    try:
        fused = _with_fused_pass(adapter, plain)
        reason = _inequality(fused, plain, deadline or Deadline()) if fused is not None else _UNPREPARED
    except MemoryError:
        reason = _NoRoom("fused ones find no room in the GPU's memory")
    if fused is None or reason is not None:
        fused = None  # its memory is free before the cache of it is
        return _slowed(plain, reason or _UNPREPARED)
    fused.findings.append(
        f"PoC computes with fused operations: in batches of {_in_words(_batches(plain))} tokens they gave what vLLM's "
        "own gave."
    )
    return fused


def _slowed(plain: PocModelRunner, reason: str) -> PocModelRunner:
    """Let ``plain`` say why it is taken. What was late is tried again: kernels that were compiled stay compiled."""
    before = plain.slower.late if plain.slower is not None else 0
    late = before + 1 if isinstance(reason, _Late) else 0
    passes = isinstance(reason, _NoRoom) or 0 < late < _LOOKS
    finding = f"{_SLOWER} since {reason}{'; it is tried again' if passes else ''}."
    plain.slower = Slower(finding, passes, late)
    plain.findings.append(finding)
    if plain.stage.adapter.device.type == "cuda":
        torch.cuda.empty_cache()  # of what the fused one held, which chat may need
    return plain


def _batches(plain: PocModelRunner) -> list[BatchShape]:
    return parity_batches(plain.stage.limits, plain.stage.adapter.borders)


def _in_words(shapes: Collection[BatchShape]) -> str:
    return ", ".join(f"{shape.nonces} x {shape.seq_len}" for shape in shapes)


def _may_fuse(adapter: ModelAdapter) -> bool:
    if adapter.device.type != "cuda" or needs_vllms_operations():
        return False
    try:
        # A release may lack what these read.
        from vllm_poc.worker.passes import attention, recurrent  # noqa: PLC0415

        layers = adapter.attention_layers.values()
        known = (attention.needs_no_cache, attention.rounds_in_cache, attention.is_compressed, recurrent.is_recurrent)
        return any(knows(layers) for knows in known)
    except Exception:
        _log.exception("PoC does not know this attention")
        return False


def _with_fused_pass(adapter: ModelAdapter, plain: PocModelRunner) -> PocModelRunner | None:
    """Return a runner with the fused pass, or None if a rank cannot prepare one. MemoryError if one has no room."""
    fused, error = _prepared_fused_pass(adapter, plain)
    if adapter.ranks.agreed(error is None):
        return fused
    if adapter.ranks.agreed(error is None or lacks_memory(error)):
        raise MemoryError
    return None


def _prepared_fused_pass(
    adapter: ModelAdapter, plain: PocModelRunner
) -> tuple[PocModelRunner | None, Exception | None]:
    try:
        from vllm_poc.worker.passes.fused import FusedPass  # noqa: PLC0415 - needs Triton

        fused = FusedPass(adapter)
        limits = fused_facts(
            plain.stage.limits, experts=adapter.has_experts, cached=fused.needs_cache, larger=fused.takes_larger_batches
        )
        runner = PocModelRunner(adapter, limits, fused)
        runner.memory.fixed = fused.fixed_bytes
    except Exception as error:
        _log.exception("PoC cannot prepare fused operations")
        return None, error
    return runner, None


class _Late(str):
    """That the comparison was not over in time."""

    __slots__ = ()


class _NoRoom(str):
    """That the device's memory had no room for it."""

    __slots__ = ()


#: So many looks in a row may end before the fused pass is compared, as where kernels take minutes to compile.
_LOOKS = 5
_UNPREPARED = "it cannot prepare fused ones, and the worker's log says why"


def _inequality(fused: PocModelRunner, plain: PocModelRunner, deadline: Deadline) -> str | None:
    """Return why the fused pass is not used, or None; the same on all ranks. MemoryError if there is no room for it."""
    stage = plain.stage
    batches = _batches(plain)
    if deadline.passed(stage):
        return _late(batches[0], deadline)
    # Alone, since larger batches are foreseen from what these take.
    with fused.memory.learning(max(shape.tokens for shape in batches)):
        found = hidden_states(fused.stage, deadline)
    if found is None:
        return "a small batch fails with fused ones, and the worker's log says how"
    for number, shape in enumerate(batches):
        own = found[number] if number < len(found) else None
        if differs := _difference(fused.stage, stage, shape, own, deadline):
            return differs
    return None


def _difference(
    fused: StageForward, plain: StageForward, shape: BatchShape, found: Tensor | None, deadline: Deadline
) -> str | None:
    """Return why batches of this shape are not equal, or None; the same on all ranks."""
    tolerances = Tolerances.of(plain.adapter.dtype, quantised=plain.adapter.is_quantised)
    called = f"a batch of {shape.nonces} x {shape.seq_len} tokens"
    for attempt in range(TRIES):
        if deadline.passed(plain):
            return _late(shape, deadline)
        compared = compare(plain, fused, shape, found, attempt)
        if compared is None:
            return f"{called} fails with fused ones, and the worker's log says how"
        if plain.adapter.ranks.agreed(compared.is_equal(tolerances)):
            return None
        if not compared.is_equal(tolerances):
            _log.warning("with fused operations, %s is %s away; allowed are %s", called, compared, tolerances)
        if not plain.adapter.ranks.agreed(hangs_on_a_bit(plain.adapter) and compared.may_be_chance(tolerances)):
            break
    return f"{called} is further from vLLM's own than rounding makes it"


def _late(shape: BatchShape, deadline: Deadline) -> _Late:
    return _Late(f"a batch of {shape.nonces} x {shape.seq_len} tokens was not compared within {deadline.seconds:g} s")


def _answer(call: Callable[[], T]) -> T | Failure:
    try:
        return call()
    except Exception as error:
        if not isinstance(error, OtherRankError):  # that one logs its own
            _log.exception("PoC failed on this worker")
        return Failure(error=f"{type(error).__name__}: {error}")
