# SPDX-License-Identifier: Apache-2.0
"""The PoC service of one server process: at most one round, and requests for named nonces beside it."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar
from uuid import uuid4

import aiohttp

from vllm_poc.logs import get_logger
from vllm_poc.server import admission
from vllm_poc.server.bodies import off_loop
from vllm_poc.server.callbacks.outbox import Outbox
from vllm_poc.server.chains import ChainScheduler, Computers
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.server.engine import EngineError, VllmEngine
from vllm_poc.server.errors import ServerEndsError
from vllm_poc.server.gate import Patience, RequestShare
from vllm_poc.server.jobs import Job, JobQueue, RequestWorker, Result, Waits
from vllm_poc.server.phases import Phases
from vllm_poc.server.scheduler import Scheduler
from vllm_poc.server.status import known_facts, model_limits, status_response
from vllm_poc.server.vllm_routes import Pauses
from vllm_poc.settings import Settings
from vllm_poc.wire.answers import CommandResponse, PowState, StatusResponse, VersionsResponse
from vllm_poc.wire.generate import GenerateRequest, JobResponse, ProofBatch, ProofVerdict
from vllm_poc.wire.messages import (
    CallbackRequest,
    ExtendRequest,
    InitGenerateRequest,
    InitRequest,
    LeaseRenewal,
    Protocol,
    Scheme,
)

_log = get_logger(__name__)

#: How much of the time of a drain chains may take. The rest is for deliveries.
_COMPUTING_SHARE = 0.5

T = TypeVar("T")


class PocService:
    """Executes the protocol's calls on the round's ``phases`` and the queued ``jobs``.

    Make it inside a running event loop, and `close` it.
    """

    def __init__(
        self,
        engine: VllmEngine,
        settings: Settings,
        clock: Clock = SYSTEM_CLOCK,
        pauses: Pauses | None = None,
        *,
        access: admission.Access,
    ) -> None:
        self.session_id = token_hex(8)
        self.engine = engine
        self._settings = settings
        self._access = access
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))  # each post has its own
        self.scheduler = scheduler = Scheduler(engine, settings, pauses, clock)
        self._gate = scheduler.gate
        self._answering: set[asyncio.Task[Any]] = set()  # the requests that clients wait for
        self._schemes, self._rebuilt = [Scheme.PREFILL], False  # until the engine has told
        computers = Computers(scheduler, ChainScheduler(scheduler, engine, settings))
        self.phases = Phases(computers, self._session, settings, clock)
        self._outbox = Outbox(self._session, settings, clock)
        share = RequestShare(lambda: self.phases.computes, settings, clock)
        self._work = RequestWorker(computers, self._outbox, self.phases.free, share)
        self.jobs = JobQueue(ready=self.phases.free, work=self._perform, settings=settings, clock=clock)

    async def look_at_model(self) -> None:
        """Find out what the model allows, before anybody asks. What goes wrong is in the log and in the status."""
        with suppress(EngineError, ServerEndsError):
            await self.scheduler.model.facts()

    async def versions(self, vllm_version: str) -> VersionsResponse:
        """Return what runs here, and what a client may order."""
        facts = await known_facts(self.scheduler.model, paused_by=self._gate.pauses.reason)
        if facts is not None:
            # Kept while busy chat holds up the look at new weights: clients remember for a while what is not offered.
            self._schemes = admission.offered_schemes(facts)
            self._rebuilt = "decode" in facts and facts["decode"]["rebuilt"]
        protocols = [Protocol.DISTANCE, Protocol.ARTIFACT]
        if Scheme.DECODE in self._schemes:
            protocols.append(Protocol.DECODE)
        return VersionsResponse(
            vllm_version=vllm_version, protocols=protocols, schemes=self._schemes, rebuilt_codebook=self._rebuilt
        )

    async def start(self, request: InitGenerateRequest) -> CommandResponse:
        """Start a round; a repeat with the same ``round_id`` and content answers with what runs."""
        await self.phases.start(request, await self._known_limit(request))
        return self._answer(PowState.GENERATING)

    async def extend(self, request: ExtendRequest) -> CommandResponse:
        """Let the round compute on, up to another index."""
        await self.phases.extend(request)
        return self._answer(PowState.GENERATING)

    async def init(self, request: InitRequest, phase: PowState) -> CommandResponse:
        """Take over a distance round, to generate or validate later (IDLE), or to validate now (VALIDATING)."""
        await self._known_limit(request)
        await self.phases.init(request, phase)
        return self._answer(phase)

    async def resume(self) -> CommandResponse:
        """Generate the distance round on from what was delivered."""
        await self.phases.resume(await self._known_limit(self.phases.distance_config()))
        return self._answer(PowState.GENERATING)

    async def validate_phase(self) -> CommandResponse:
        """Let the distance round validate from now on."""
        await self.phases.validate()
        return self._answer(PowState.VALIDATING)

    async def stop(self, round_id: str | None = None, preempted_by: str | None = None) -> CommandResponse:
        """Stop the round, and queued work too unless only the round is named; results stay.

        ``preempted_by`` names the round that the pod is for.
        """
        if round_id is None:
            # Before the round: its end would let them start.
            await self.jobs.cancel("cancelled by stop")
        await self.phases.stop(round_id, preempted_by)
        return self._answer(PowState.STOPPED)

    async def generate(self, request: GenerateRequest) -> Result | JobResponse:
        """Compute the named nonces when no round generates and chat lets PoC pass; now, or queued."""
        await off_loop(len(request.nonces), partial(admission.check_validation, request))
        limit = await self._known_limit(request)
        if not request.wait:
            return self.jobs.submit(request)
        patience = self._patience(self._settings.busy_seconds if request.beside_round else None)
        waits = Waits.BESIDE_ROUND if request.beside_round else Waits.FOR_ROUND
        with self.jobs.counted(len(request.nonces), waits):
            work = self._work.result(request, uuid4().hex, limit, patience.renew)
            return await self._answered(work, patience)

    async def prove(self, batch: ProofBatch) -> ProofVerdict:
        """Recompute a proof batch for the distance round."""
        round_ = self.phases.distance_config()
        limit = await self._known_limit(round_)
        patience = self._patience(self._settings.busy_seconds)
        with self.jobs.counted(len(batch.nonces), Waits.BESIDE_ROUND):
            return await self._answered(self._work.proof(round_, batch, limit, patience.renew), patience)

    async def status(self, *, lists: bool = True, renewal: LeaseRenewal | None = None) -> StatusResponse:
        """Return the state of the round; the model's limits are 0 as long as the engine does not answer.

        The lease of the round that generates is renewed first, if ``renewal`` names it.
        """
        if renewal is not None and renewal.renew_lease is not None:
            self.phases.renew_lease(renewal.renew_lease, renewal.lease_seconds)
        limits = await model_limits(
            self.engine.served_names,
            self.scheduler.model,
            paused_by=self._gate.pauses.reason,
            shortage=self.scheduler.shortage.error,
        )
        return status_response(
            self.session_id,
            limits,
            self.phases,
            self._outbox,
            lists=lists,
            paused_by=self._gate.pauses.reason,
        )

    async def forget(self) -> None:
        """Find out anew what was found of other weights."""
        try:
            await self.scheduler.forget()
        except EngineError as error:
            _log.error("the workers did not drop what they know of the former weights, and must before PoC: %s", error)

    async def rest(self) -> None:
        """Wait until no call is under way, and no device has work of one that was answered."""
        await self.scheduler.idle()
        try:
            await self.engine.rest()
        except EngineError as error:  # the command is vLLM's, and is passed on whatever becomes of PoC
            _log.error("a GPU may still compute for PoC while vLLM does what it is told: %s", error)

    async def sleeps(self) -> bool:
        """Whether the engine sleeps, at least in part, or does not say."""
        try:
            return await self.engine.sleeps()
        except EngineError as error:
            _log.error("PoC stays paused until vLLM wakes up again: %s", error)
            return True

    async def drain(self) -> None:
        """Compute no further than the slice that is computed, and deliver what there is, within the time for that.

        A batch of chains is computed to its end if that comes soon enough.
        """
        self._gate.close(_COMPUTING_SHARE * self._settings.drain_seconds)
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                await asyncio.gather(self.phases.drain(), self._drain_requests())
        except TimeoutError:
            seconds = f"{self._settings.drain_seconds:g} s"
            results, callbacks = self.phases.pending, self._outbox.pending
            _log.error("not delivered within %s: %d results and %d other callbacks", seconds, results, callbacks)

    async def close(self) -> None:
        """End all work at once and release the connections."""
        self.scheduler.shortage.end()
        await self.scheduler.model.end()
        await self.jobs.cancel("cancelled by the server's end")
        await self.phases.close()
        await self._outbox.close()
        await self._session.close()

    async def _drain_requests(self) -> None:
        await self._outbox.hurry()
        await self.jobs.ended()
        if self._answering:
            await asyncio.wait(self._answering)
        await self._outbox.drained()

    async def _perform(self, job: Job, request: GenerateRequest) -> None:
        await self._work.perform(job, request, await self._checked(request))

    async def _checked(self, request: CallbackRequest) -> int:
        # Returns how many nonces a forward pass may hold.
        facts = await self.scheduler.model.facts()
        admission.check_round(request, facts, self.engine.served_names)
        admission.check_callback(request, self._access)
        return admission.slice_limit(request, facts)

    async def _known_limit(self, request: CallbackRequest) -> int:
        return await self._answered(self._checked(request), self._patience(self._settings.busy_seconds))

    def _patience(self, busy_seconds: float | None) -> Patience:
        why = "a round runs" if self.phases.state is PowState.GENERATING else "the server is busy"
        return Patience(self._settings.request_seconds, busy_seconds, why)

    async def _answered(self, work: Coroutine[Any, Any, T], patience: Patience) -> T:
        """Return what ``work`` returns; 503 at once if vLLM is paused or becomes so, or if ``patience`` ends."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - as in every coroutine
        self._answering.add(task)
        try:
            async with patience.limited():
                return await self._gate.unless_paused(work)
        finally:
            self._answering.discard(task)

    def _answer(self, state: PowState) -> CommandResponse:
        return CommandResponse(pow_status=self.phases.pow_status(self.session_id, state))
