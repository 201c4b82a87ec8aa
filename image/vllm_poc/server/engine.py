# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine as PoC sees it, by its public API alone."""

import asyncio
from typing import Any, Protocol, TypeVar

from vllm_poc.rpc import (
    BatchRequest,
    BatchResult,
    DecodeFacts,
    DecodeRequest,
    DecodeResult,
    DecodeSetup,
    ModelFacts,
    PassFields,
    PassTiming,
    chain_nonces,
    no_chains,
)

#: Exceptions of workers whose device has no room.
_NO_MEMORY = ("MemoryError:", "OutOfMemoryError:")
#: Tokens of the prefill, and steps, of the network's chains.
_NETWORKS_CHAIN = (256, 256)
#: Calls that leave nothing on a device.
_WITHOUT_WORK = ("poc_rest", "poc_forget")
#: Share of a call's limit after which a look at the model begins no further batch. The rest is for the one that it has
#: begun: what a call computes that was given up would hold back chat on a server that says it is healthy.
_LOOK_SHARE = 0.5

T = TypeVar("T")


class EngineError(Exception):
    """The engine failed, did not answer in time, or answered no numbers."""


class NoMemoryError(EngineError):
    """The device has no room for the work."""


class WeightsChangedError(EngineError):
    """vLLM got new weights, or PoC a faster pass, while work was on its way, which therefore has to begin anew."""

    def __init__(self) -> None:
        super().__init__("vLLM got new weights, or PoC a faster pass, while this was computed: ask again")


class OutputProcessor(Protocol):
    """What is needed of vLLM's output processor: it knows every inference request of this process."""

    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs."""
        ...


class EngineClient(Protocol):
    """What is needed of vLLM's ``AsyncLLM``."""

    output_processor: OutputProcessor

    # In vLLM's words, hence a timeout that is a parameter.
    async def collective_rpc(self, method: str, timeout: float, args: tuple[object, ...]) -> list[Any]:  # noqa: ASYNC109
        """Call a worker method by name; one answer per rank. The engine gives up after ``timeout`` seconds."""
        ...

    async def is_sleeping(self) -> bool:
        """Whether memory of the model is given away."""
        ...


class VllmEngine:
    """Calls vLLM's ``AsyncLLM``, whose workers carry `vllm_poc.worker`'s extension.

    ``served_names`` are the names and paths by which a request may name the model.
    """

    def __init__(self, client: EngineClient, served_names: frozenset[str], *, call_seconds: float) -> None:
        self.served_names = served_names
        self._client = client
        self._call_seconds = call_seconds
        self._under_way = set[asyncio.Task[list[Any]]]()  # calls that have no answer so far, whoever waits for them
        self._gave_work = False  # since the devices have rested

    async def facts(self, decode: DecodeSetup | None = None) -> ModelFacts:
        """Describe the model for one who does nothing else meanwhile. EngineError if the engine does not answer."""
        while (facts := await self.look()).get("late"):
            pass
        return await self.with_decode(facts, decode)

    async def with_decode(
        self, facts: ModelFacts, decode: DecodeSetup | None, before: ModelFacts | None = None
    ) -> ModelFacts:
        """Prepare the decode scheme, if it is set up, and say so beside what a look has found.

        What keeps it from running is a refusal of it, which ``passes`` if another try may fare better. One that was
        prepared ``before`` stays, if the pass does.
        """
        if decode is None or facts["refusal"] is not None:
            return facts
        if before is not None and "decode" in before and facts["fused"] == before["fused"]:
            prepared = before["decode"]
            if prepared["refusal"] is None:
                return {**facts, "decode": prepared, "findings": [*facts["findings"], *_findings(prepared)]}
        try:
            found = await self.prepare_decode(decode)
        except NoMemoryError as error:
            remedy = "set fewer bytes aside, or start vLLM with a lower --gpu-memory-utilization"
            found = _may_pass(decode, f"{error}: {remedy}.")
        except EngineError as error:
            found = _may_pass(decode, f"{error}: it is tried again now and then, and vLLM's log has more.")
        tokens = sum(_NETWORKS_CHAIN)
        if found["refusal"] is None and not chain_nonces(found, tokens):
            why = f"{found['reserve_bytes']} bytes do not hold one of the network's chains of {tokens} tokens"
            found = {**found, "refusal": f"{why}: set more bytes aside."}
        return {**facts, "decode": found, "findings": [*facts["findings"], *_findings(found)]}

    async def look(self) -> ModelFacts:
        """Describe the model, which takes seconds the first time. EngineError if the engine does not answer."""
        ranks: list[ModelFacts] = await self._call("poc_describe", _LOOK_SHARE * self._call_seconds)
        facts = next((facts for facts in ranks if facts["refusal"] is not None), ranks[0])
        return {
            **facts,
            "scratch_bytes": max(rank["scratch_bytes"] for rank in ranks),
            "attention": sorted({name for rank in ranks for name in rank["attention"]}),
            "experts": sorted({name for rank in ranks for name in rank["experts"]}),
            "findings": list(dict.fromkeys(finding for rank in ranks for finding in rank["findings"])),
        }

    async def forget(self) -> None:
        """Let the workers drop what they have made of the model's weights. EngineError if the engine fails."""
        await self._call("poc_forget")

    async def rest(self) -> None:
        """Let the devices end what they were given: an answer leaves the next step on a GPU. EngineError if one fails.

        Nothing if they were given nothing since.
        """
        if self._gave_work:
            self._gave_work = False
            try:
                await self._call("poc_rest")
            except EngineError:
                self._gave_work = True  # nobody knows what is left
                raise

    async def sleeps(self) -> bool:
        """Whether the engine sleeps, at least in part. EngineError if it does not say."""
        try:
            async with asyncio.timeout(self._call_seconds):
                return await self._client.is_sleeping()
        except Exception as error:
            raise EngineError(f"vLLM does not say whether it sleeps: {str(error) or type(error).__name__}") from error

    async def idle(self) -> None:
        """Wait until no call is under way, also none that nobody waits for any more."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def compute(self, batch: BatchRequest) -> BatchResult:
        """Run the batch's forward passes, or a segment of one. EngineError if it fails or takes too long."""
        results: list[BatchResult] = await self._call("poc_compute", batch)
        return _only("poc_compute", results)

    async def warm_up(self, batch: BatchRequest, segment_seconds: float, keep: list[PassFields]) -> PassTiming:
        """Let the workers ready such a forward pass, and drop all that they captured of other kinds than ``keep``.

        Passes that take longer than ``segment_seconds`` are cut where the workers can. EngineError as `compute`.
        """
        ranks: list[PassTiming] = await self._call("poc_warm_up", batch, segment_seconds, keep)
        return ranks[0]  # they answer alike

    async def prepare_decode(self, setup: DecodeSetup) -> DecodeFacts:
        """Let the workers set memory aside for the decode scheme; say what that allows, or why none is computed here.

        EngineError as `compute`.
        """
        ranks: list[DecodeFacts] = await self._call("poc_prepare_decode", setup)
        return next((facts for facts in ranks if facts["refusal"] is not None), ranks[0])

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        """Let the workers do the next forward passes of the request's chains. EngineError as `compute`."""
        results: list[DecodeResult] = await self._call("poc_decode", request)
        return _only("poc_decode", results)

    def has_unfinished_chat(self) -> bool:
        """Whether inference requests wait or run. PoC's own calls do not count as such."""
        return self._client.output_processor.has_unfinished_requests()

    async def _call(self, method: str, *args: object) -> list[Any]:
        self._gave_work |= method not in _WITHOUT_WORK
        calling = asyncio.create_task(self._ask(method, args))
        self._under_way.add(calling)
        calling.add_done_callback(self._ended)
        # The workers go on whoever waits, and so does the task: our limit and a cancelled caller do not end it.
        await asyncio.wait([calling], timeout=self._call_seconds)
        if not calling.done():
            raise EngineError(f"{method} did not answer within {self._call_seconds:g} s")
        try:
            answers = calling.result()
        except TimeoutError:
            raise EngineError(f"{method} did not answer within {self._call_seconds:g} s") from None
        except Exception as error:
            raise EngineError(f"{method} failed: {str(error) or type(error).__name__}") from error
        answers = [answer for answer in answers if answer is not None]
        errors = dict.fromkeys(answer["error"] for answer in answers if "error" in answer)
        if errors:
            lacks_memory = any(error.startswith(_NO_MEMORY) for error in errors)
            raise (NoMemoryError if lacks_memory else EngineError)(f"{method} failed: {'; '.join(errors)}")
        if not answers:
            raise EngineError(f"{method} was answered by no worker")
        return answers

    async def _ask(self, method: str, args: tuple[object, ...]) -> list[Any]:
        # The engine gives up later than we do, since it takes a late answer for that to its next call. It
        # must give up, since a rank that hangs would hold back chat, too, until vLLM's own limit ends the server.
        limit = 2 * self._call_seconds
        async with asyncio.timeout(limit):  # an engine that does not even give up is waited for no longer
            return await self._client.collective_rpc(method, limit, args)

    def _ended(self, calling: asyncio.Task[list[Any]]) -> None:
        self._under_way.discard(calling)
        noticed(calling)


def noticed(ended: asyncio.Task[Any]) -> None:
    """Look at how a task has ended, in place of those who wait for it: they may be gone."""
    if not ended.cancelled():
        ended.exception()


def _may_pass(setup: DecodeSetup, refusal: str) -> DecodeFacts:
    return {**no_chains(refusal, rebuilt=setup["rebuild"]), "passes": True}


def _findings(decode: DecodeFacts) -> list[str]:
    """Return sentences for people about the decode scheme, unless it is refused."""
    if decode["refusal"] is not None:
        return []
    most = chain_nonces(decode, sum(_NETWORKS_CHAIN))
    seq_len, max_tokens = _NETWORKS_CHAIN
    found = [f"The decode scheme has memory for {most} chains of {seq_len} tokens and {max_tokens} steps at a time."]
    if decode["rebuilt"]:
        found.append(
            "The decode scheme uses a codebook that was made here, which is for experiments alone: its chains are not "
            "those of the network."
        )
    return [*found, *decode.get("findings", [])]


def _only(method: str, results: list[T]) -> T:
    if len(results) != 1:
        raise EngineError(f"{method} was answered by {len(results)} workers instead of one")
    return results[0]
