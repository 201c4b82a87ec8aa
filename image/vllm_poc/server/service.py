# SPDX-License-Identifier: Apache-2.0
"""The PoC service of one server process: at most one round, and requests for single nonces beside it."""

import asyncio
import contextlib
from http import HTTPStatus
from uuid import uuid4

import aiohttp

from vllm_poc.server import limits, payloads
from vllm_poc.server.engine import EngineError, PocEngine
from vllm_poc.server.errors import RefusalError, refusal
from vllm_poc.server.generation import Round
from vllm_poc.server.settings import Settings
from vllm_poc.server.slices import Item, SliceRunner
from vllm_poc.server.status import idle_status, pow_status, round_status
from vllm_poc.wire.base import PowState
from vllm_poc.wire.requests import GenerateRequest, InitGenerateRequest
from vllm_poc.wire.responses import (
    CommandResponse,
    ErrorResponse,
    GeneratedResponse,
    ModelLimits,
    StatusResponse,
)
from vllm_poc.worker.batches import ModelFacts


class PocService:
    """Executes the protocol's calls. Make it inside a running event loop, and `close` it."""

    def __init__(self, engine: PocEngine, settings: Settings) -> None:
        self.session_id = uuid4().hex
        self._engine = engine
        self._settings = settings
        self._runner = SliceRunner(engine, settings)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=settings.callback_seconds))
        self._commands = asyncio.Lock()  # a start waits for a stop that still flushes
        self._round: Round | None = None
        self._facts: ModelFacts | None = None

    @property
    def is_generating(self) -> bool:
        """Whether a round runs."""
        return self._round is not None and self._round.state is PowState.GENERATING

    async def start(self, request: InitGenerateRequest) -> CommandResponse:
        """Start a round; a repeat with the same ``round_id`` and content answers with what runs."""
        facts = await self._described()
        limits.check_round(request, facts, self._engine.served_names)
        limits.check_callback(request, self._settings)
        async with self._commands:
            if self._round is not None and self._round.state is PowState.GENERATING:
                _refuse_other_work(self._round.request, request)
            else:
                await self._replace_round(request, facts)
        return self._answer(PowState.GENERATING)

    async def stop(self, round_id: str | None = None) -> CommandResponse:
        """Stop computing and deliver what is left, within the flush time; refused if another round runs."""
        async with self._commands:
            if self._round is not None:
                if round_id is not None and self._round.state is PowState.GENERATING:
                    _refuse_other_round(self._round.request, round_id)
                await self._round.stop()
        return self._answer(PowState.STOPPED)

    async def generate(self, request: GenerateRequest) -> GeneratedResponse:
        """Compute the named nonces between the slices of a running round, and while chat is idle."""
        limits.check_offered(request)
        facts = await self._described()
        limits.check_round(request, facts, self._engine.served_names)
        try:
            async with asyncio.timeout(self._settings.request_seconds):
                items = await self._compute(request, limits.slice_limit(request, facts))
        except TimeoutError:
            raise self._too_slow() from None
        except EngineError as error:
            raise _engine_refusal(error) from error
        return payloads.generated(request, items)

    async def status(self, *, lists: bool = True) -> StatusResponse:
        """Return the state of the round; the model's limits are 0 as long as the engine does not answer."""
        model = await self._model_limits()
        if self._round is None:
            return idle_status(self.session_id, model)
        return round_status(self.session_id, model, self._round, lists=lists)

    async def close(self) -> None:
        """End the round at once and release the connections."""
        if self._round is not None:
            await self._round.close()
        await self._session.close()

    async def _replace_round(self, request: InitGenerateRequest, facts: ModelFacts) -> None:
        if self._round is not None:
            await self._round.close()
        self._round = Round(
            request,
            runner=self._runner,
            slice_limit=limits.slice_limit(request, facts),
            session=self._session,
            settings=self._settings,
        )

    async def _compute(self, request: GenerateRequest, limit: int) -> list[Item]:
        size, items = self._runner.slice_size(limit), list[Item]()
        done = 0
        while done < len(request.nonces):
            nonces = request.nonces[done : done + size.nonces]
            items += (await self._runner.run(request, nonces, size)).items
            done += len(nonces)
        return items

    async def _described(self) -> ModelFacts:
        if self._facts is None:
            try:
                self._facts = await self._engine.facts()
            except EngineError as error:
                raise _engine_refusal(error) from error
        return self._facts

    async def _model_limits(self) -> ModelLimits:
        names = sorted(self._engine.served_names)
        with contextlib.suppress(RefusalError):
            facts = await self._described()
            return ModelLimits(names=names, max_seq_len=facts["max_model_len"], hidden_size=facts["hidden_size"])
        return ModelLimits(names=names)

    def _answer(self, state: PowState) -> CommandResponse:
        return CommandResponse(pow_status=pow_status(self.session_id, self._round, state))

    def _too_slow(self) -> RefusalError:
        seconds = self._settings.request_seconds
        detail = f"the nonces were not done within {seconds:g} s: ask for fewer, or when the server is idle"
        return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "Busy", detail)


def _refuse_other_work(running: InitGenerateRequest, wanted: InitGenerateRequest) -> None:
    if wanted.round_id is None or not running.same_work(wanted):
        raise _conflict(running)


def _refuse_other_round(running: InitGenerateRequest, round_id: str) -> None:
    if running.round_id != round_id:
        raise _conflict(running)


def _conflict(running: InitGenerateRequest) -> RefusalError:
    what = f"round {running.round_id}" if running.round_id is not None else "a round without round_id"
    detail = f"Already generating: {what} runs; stop it first"
    body = ErrorResponse(
        reason="RoundConflict",
        detail=detail,
        running=payloads.round_config(running),
        round_id=running.round_id,
    )
    return RefusalError(HTTPStatus.CONFLICT, body)


def _engine_refusal(error: EngineError) -> RefusalError:
    return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "EngineFailed", str(error))
