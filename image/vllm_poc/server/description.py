# SPDX-License-Identifier: Apache-2.0
"""What the workers say of the model: whether PoC runs on this server, by which passes, and what it found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

from vllm_poc.logs import get_logger
from vllm_poc.rpc import ModelFacts
from vllm_poc.server.clock import SYSTEM_CLOCK, Clock
from vllm_poc.server.engine import EngineError, NoMemoryError
from vllm_poc.server.errors import ServerEndsError
from vllm_poc.server.gate import ROOM_AGAIN_SECONDS

_log = get_logger(__name__)

#: Seconds after which a decode scheme that could not be prepared is tried again.
_DECODE_AGAIN_SECONDS = 60.0
#: Seconds after which a model is looked at again that could not be. Whoever only wants to know waits as long.
_DESCRIBED_AGAIN_SECONDS = 30.0
#: A faster pass that found no room is tried half as often each time, since it takes seconds of chat, up to this.
_MOST_SECONDS = 3600.0


class ModelDescription:
    """What the workers say of the model: found once for all who ask, and anew for other weights.

    What fails, and what may fare better another time, is tried again by the ``clock``. ``turn`` is a context in which
    the workers may compute. ``describe`` asks them, and is told what they said before, if it is asked again; it raises
    EngineError if it fails. ``is_faster`` is called when another try has found a faster pass.
    """

    def __init__(
        self,
        turn: Callable[[], AbstractAsyncContextManager[None]],
        describe: Callable[[ModelFacts | None], Awaitable[ModelFacts]],
        is_faster: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.known: ModelFacts | None = None
        #: What the workers said of the last chains, in sentences.
        self.of_chains: list[str] = []
        self.error: str | None = None
        #: Whether the last error is that the device has no room.
        self.lacks_memory = False
        self._turn = turn
        self._describe = describe
        self._is_faster = is_faster
        self._clock = clock
        self._task: asyncio.Task[ModelFacts] | None = None
        self._begun: asyncio.Task[ModelFacts] | None = None  # the last one that has got its turn
        self._looking: asyncio.Task[None] | None = None
        self._trying: asyncio.Task[None] | None = None
        self._told = set[str]()  # what is in the log
        self._waits = False  # for another try after a failure
        self._slower_tries = 0
        self._ended = False

    async def facts(self) -> ModelFacts:
        """Return it; all who ask meanwhile wait for the same answer. EngineError if there is none."""
        if self.known is not None:
            return self.known
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._find())
        return await asyncio.shield(self._task)

    async def glance(self, seconds: float) -> ModelFacts | None:
        """Return it if it is there within so many seconds."""
        fails = self.error is not None and (
            self._task is None or self._task.done()
        )  # until the clock lets it try again
        if self.known is None and not fails:
            with suppress(TimeoutError, EngineError, ServerEndsError):
                async with asyncio.timeout(seconds):
                    await self.facts()
        return self.known

    def look(self) -> None:
        """Find it when the workers may compute, also if nobody asks."""
        if not self._ended and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())

    def note(self, of_chains: list[str]) -> None:
        """Keep what the workers say of the last chains."""
        self.of_chains = of_chains
        for finding in of_chains:
            self._tell(logging.WARNING, finding)

    @property
    def findings(self) -> list[str]:
        """What was found out about this server, in sentences for people."""
        return [*self.known["findings"], *self.of_chains] if self.known is not None else []

    def forget(self) -> None:
        """Find it anew when somebody asks, or looks."""
        self.known = None
        if self._task is self._begun:  # one that has not will find what is new
            self._task = None
        self.of_chains = []
        self._slower_tries = 0

    async def end(self) -> None:
        """Look no more."""
        self._ended = True
        tasks = [task for task in (self._looking, self._trying, self._task) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look(self) -> None:
        with suppress(EngineError, ServerEndsError):
            while self.known is None:  # it may have been forgotten meanwhile
                await self.facts()

    async def _find(self) -> ModelFacts:
        task = asyncio.current_task()
        try:
            async with self._turn():
                self._begun = self._task if self._task is task else self._begun
                facts = await self._describe(None)
        except EngineError as error:
            self._fail(error)
            raise
        if self._task is task:  # otherwise it was forgotten meanwhile
            self._told.clear()
            self.error, self.lacks_memory = None, False
            self._take(facts)
        return facts

    def _fail(self, error: EngineError) -> None:
        if self.error != str(error):  # it is tried again and again
            _log.error("PoC cannot run, and tries again every %g s: %s", _DESCRIBED_AGAIN_SECONDS, error)
        self.error, self.lacks_memory = str(error), isinstance(error, NoMemoryError)
        if not self._waits:
            self._waits = True
            self._clock.call_later(_DESCRIBED_AGAIN_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._waits = False
        self.look()

    def _take(self, facts: ModelFacts) -> None:
        self.known = facts
        for finding in facts["findings"]:
            self._tell(logging.WARNING if finding == facts.get("slower") else logging.INFO, finding)
        if facts["refusal"] is not None:
            self._tell(logging.ERROR, f"PoC does not run on this server: {facts['refusal']}")
        again = None
        if facts.get("passes"):
            again = min(ROOM_AGAIN_SECONDS * 2**self._slower_tries, _MOST_SECONDS)
            self._slower_tries += 1
        if "decode" in facts and facts["decode"]["refusal"] is not None:
            self._tell(logging.ERROR, f"this server does not offer the decode scheme: {facts['decode']['refusal']}")
            if facts["decode"].get("passes") and again is None:  # or as seldom as a look: both wait for the same memory
                again = _DECODE_AGAIN_SECONDS
        if again is not None:
            self._clock.call_later(again, partial(self._try_again, facts))

    def _tell(self, level: int, message: str) -> None:
        if message not in self._told:  # some is found again and again
            self._told.add(message)
            _log.log(level, "%s", message)

    def _try_again(self, before: ModelFacts) -> None:
        if self.known is before and not self._ended:
            self._trying = asyncio.create_task(self._find_again(before))

    async def _find_again(self, before: ModelFacts) -> None:
        facts = before  # which hold on for another time if the engine fails
        with suppress(EngineError, ServerEndsError):
            async with self._turn():
                if self.known is before:
                    facts = await self._describe(before)
        if self.known is before:
            self._take(facts)
            if facts["fused"] and not before["fused"]:
                self._is_faster()
