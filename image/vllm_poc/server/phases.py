# SPDX-License-Identifier: Apache-2.0
"""The one round of this server and its phases.

    state        event                                       next state
    (any)        init                                        IDLE
    (any)        init/validate, phase/validate               VALIDATING
    (any)        init/generate, phase/generate               GENERATING
    GENERATING   stop, the slot's last nonce delivered,      STOPPED
                 or the lease run out
    GENERATING   the engine fails                            FAILED
    VALIDATING   stop                                        STOPPED

While a round generates, init calls are refused, except for a repetition of the start that it runs by. The phase calls
switch a distance round between its two phases; generation then goes on where its deliveries had got to, with the
callback address it had. What one generation does is in `vllm_poc.server.generation`.
"""

import asyncio
from http import HTTPStatus

import aiohttp

from vllm_poc.server.callbacks.payloads import round_config
from vllm_poc.server.chains import Computers
from vllm_poc.server.clock import Clock, Lease
from vllm_poc.server.errors import RefusalError, ServerEndsError, field_refusal, refusal
from vllm_poc.server.generation import Ending, Generation
from vllm_poc.settings import Settings
from vllm_poc.wire.answers import Activity, ErrorResponse, PowState, PowStatus, StopReason
from vllm_poc.wire.messages import ExtendRequest, InitGenerateRequest, InitRequest, Protocol, SlotRequest

_ON_REQUEST = Ending(StopReason.REQUESTED, "stopped on request")
_TO_VALIDATE = Ending(StopReason.REQUESTED, "phase/validate")
_RUNNING = (PowState.GENERATING, PowState.VALIDATING)


class Phases:
    """Starts and stops the round's phases, one call after the other."""

    def __init__(self, computers: Computers, session: aiohttp.ClientSession, settings: Settings, clock: Clock) -> None:
        self.config: SlotRequest | None = None
        self.generation: Generation | None = None
        self._phase = PowState.IDLE
        self._computers = computers
        self._scheduler = computers.scheduler
        self._session = session
        self._settings = settings
        self._clock = clock
        self._former: Generation | None = None  # which failed, and still delivers
        self._leaving: asyncio.Task[None] | None = None  # waits for that one
        self._lease: Lease | None = None
        self._expiry: asyncio.Task[None] | None = None  # stops the round when its lease runs out
        self._commands = asyncio.Lock()  # a start waits for a stop that still flushes
        self._free = asyncio.Event()
        self._free.set()

    @property
    def state(self) -> PowState:
        """The phase, or how generation ended."""
        if self._phase is PowState.GENERATING and self.generation is not None:
            return self.generation.state
        return self._phase

    @property
    def activity(self) -> Activity | None:
        """What the round does now; None if none generates."""
        return self.generation.activity if self.state is PowState.GENERATING and self.generation is not None else None

    @property
    def computes(self) -> bool:
        """Whether a round uses the engine: it may compute further nonces, its receiver keeps up, and vLLM computes."""
        if self._scheduler.gate.pauses.reason is not None:
            return False
        return not self._free.is_set() and self.generation is not None and self.generation.computes

    @property
    def pending(self) -> int:
        """How many results wait for delivery: of a round that generates, and of those that have failed."""
        return sum(one.pending for one in self._delivering)

    @property
    def _delivering(self) -> set[Generation]:
        """The rounds that may have results to deliver; one that is being left may be both."""
        return {one for one in (self.generation, self._former) if one is not None}

    @property
    def lease(self) -> Lease | None:
        """The lease of the round that generates, if it has one."""
        return self._lease if self.state is PowState.GENERATING else None

    def renew_lease(self, round_id: str, seconds: int | None) -> None:
        """Renew the lease if this round generates: for its own time, or for so many seconds from now on."""
        if self.state is not PowState.GENERATING or self._round_id != round_id:
            return
        if seconds is not None and (self._lease is None or self._lease.seconds != seconds):
            self._take_lease(seconds)
        elif self._lease is not None:
            self._lease.renew()

    def pow_status(self, session_id: str, state: PowState) -> PowStatus:
        """Return the short status that answers a command, with the ``state`` that it asked for."""
        current = self.generation
        return PowStatus(
            status=state,
            session_id=session_id,
            round_id=self._round_id,
            next_index=current.counters.next_index if current is not None else 0,
            delivered_index=current.delivery.delivered.index if current is not None else 0,
        )

    async def free(self) -> None:
        """Wait until no round computes."""
        await self._free.wait()

    async def start(self, request: InitGenerateRequest, slice_limit: int) -> None:
        """Generate; other work than what runs is refused.

        A repeat with the same ``round_id`` and content changes nothing but the lease, which is taken anew, and the
        password of the callback address.
        """
        async with self._commands:
            if self.state is not PowState.GENERATING or self.generation is None:
                await self._generate(request, slice_limit)
            elif request.round_id is None or self.config is None or not self.config.same_work(request):
                raise self._conflict()
            else:
                self.generation.readdress(request.receiver)
                taken = {name: getattr(request, name) for name in ("url", "callback_url", "lease_seconds")}
                self.config = self.config.model_copy(update=taken)
                self._take_lease(request.lease_seconds)

    async def extend(self, request: ExtendRequest) -> None:
        """Let the round compute on; refused if it does not generate."""
        async with self._commands:
            if self.state is not PowState.GENERATING or self.generation is None or self._round_id != request.round_id:
                raise self._conflict()
            self.generation.extend(request.end_index)
            # `resume` begins a new generation by this.
            self.config = self.config and self.config.model_copy(update={"end_index": self.generation.end_index})

    async def init(self, request: InitRequest, phase: PowState) -> None:
        """Take ``request`` as the round, in phase IDLE or VALIDATING; refused while another one generates."""
        async with self._commands:
            if self.state is PowState.GENERATING:
                raise self._conflict()
            await self._leave()
            self.config, self.generation, self._phase = request, None, phase

    async def resume(self, slice_limit: int) -> None:
        """Generate the configured round on from what was delivered; harmless while it generates."""
        async with self._commands:
            config = self.distance_config()
            if self.state is PowState.GENERATING:
                return
            if not config.has_slot:
                message = "the round was initialised without it: call init/generate with node_id and node_count"
                raise field_refusal("node_id", message, status=HTTPStatus.BAD_REQUEST)
            if self.generation is not None:
                await self.generation.flushed()  # which moves the index to go on from
            start = self.generation.delivery.delivered.index if self.generation is not None else config.start_index
            if start >= config.slot.capacity:
                detail = "every nonce of the slot is delivered: start a round of another slot"
                raise refusal(HTTPStatus.CONFLICT, "SlotDone", detail)
            await self._generate(_generating(config, start), slice_limit)

    async def validate(self) -> None:
        """Stop generating, deliver what is left, and wait for batches to validate."""
        async with self._commands:
            self.distance_config()
            if self.generation is not None:
                await self.generation.stop(_TO_VALIDATE)
            self._phase = PowState.VALIDATING

    async def stop(self, round_id: str | None, preempted_by: str | None = None) -> None:
        """End the phase, deliver what is left; refused if ``round_id`` names another round than the one that runs.

        ``preempted_by`` names the round that the pod is for.
        """
        async with self._commands:
            if round_id is not None and self.state in _RUNNING and self._round_id != round_id:
                raise self._conflict()
            if self.generation is not None:
                await self.generation.stop(_ON_REQUEST if preempted_by is None else _preempted(preempted_by))
            if self._phase is PowState.VALIDATING:
                self._phase = PowState.STOPPED

    async def drain(self) -> None:
        """Compute no further, and deliver what there is, until cancelled; the scheduler's gate is closed."""
        await asyncio.gather(*(one.drain() for one in self._delivering))

    async def close(self) -> None:
        """End the round at once."""
        self._take_lease(None)
        for one in self._delivering:
            await one.close()

    def distance_config(self) -> SlotRequest:
        """Return the round; refused with 400 if there is none, with 409 if it has no phases to switch."""
        if self.config is None:
            detail = "PoC not initialized: no round configured; call init, init/generate or init/validate first"
            raise refusal(HTTPStatus.BAD_REQUEST, "NotInitialized", detail)
        if self.config.protocol is not Protocol.DISTANCE:
            detail = "the round is of the artifact protocol: validate artifacts by POST generate with validation"
            raise refusal(HTTPStatus.CONFLICT, "ProtocolMismatch", detail)
        return self.config

    @property
    def _round_id(self) -> str | None:
        return self.config.round_id if self.config is not None else None

    async def _generate(self, request: InitGenerateRequest, slice_limit: int) -> None:
        await self._leave()
        if self._scheduler.gate.is_closed:
            raise ServerEndsError
        self._free.clear()
        self.config, self._phase = request, PowState.GENERATING
        self.generation = Generation(
            request,
            computers=self._computers,
            slice_limit=slice_limit,
            session=self._session,
            settings=self._settings,
            clock=self._clock,
            on_idle=self._free.set,
        )
        self._take_lease(request.lease_seconds)

    async def _leave(self) -> None:
        """Let the round go. One that has failed delivers on beside the next, but no more than one at a time does."""
        self._take_lease(None)
        if self.generation is None:
            return
        if not self.generation.flushes:
            await self.generation.close()
            return
        if self._leaving is not None:
            await asyncio.wait([self._leaving])
        self._former = self.generation
        self._leaving = asyncio.create_task(self._left(self._former))

    async def _left(self, former: Generation) -> None:
        await former.flushed()
        self._former = None

    def _take_lease(self, seconds: int | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._lease = Lease(seconds, self._clock) if seconds is not None else None
        self._expiry = asyncio.create_task(self._expire(self._lease)) if self._lease is not None else None

    async def _expire(self, lease: Lease) -> None:
        while lease is self._lease:
            await lease.run_out()
            async with self._commands:
                if lease is self._lease and not lease.remaining and self.generation is not None:
                    message = f"the lease of {lease.seconds} s ran out: nobody renewed it"
                    await self.generation.stop(Ending(StopReason.LEASE_EXPIRED, message))
                    return

    def _state_in_words(self) -> str:
        if self.state not in _RUNNING:
            return "no round generates: start it first"
        what = f"round {self._round_id}" if self._round_id is not None else "a round without round_id"
        return f"Already {self.state.lower()}: {what} runs; stop it first"

    def _conflict(self) -> RefusalError:
        running = round_config(self.config) if self.config is not None else None
        body = ErrorResponse(
            reason="RoundConflict",
            detail=self._state_in_words(),
            running=running,
            round_id=self._round_id,
        )
        return RefusalError(HTTPStatus.CONFLICT, body)


def _preempted(by: str) -> Ending:
    return Ending(StopReason.PREEMPTED, f"the pod is for round {by}, which goes first")


def _generating(config: SlotRequest, start_index: int) -> InitGenerateRequest:
    fields = config.model_dump(exclude_none=True) | {"start_index": start_index}
    return InitGenerateRequest.model_validate(fields)
