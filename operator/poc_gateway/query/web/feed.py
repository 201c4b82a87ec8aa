# SPDX-License-Identifier: Apache-2.0
"""The stream that all viewers share: one look for all of them, told as server-sent events.

A viewer gets a snapshot first, then changes: the sections that differ, and those that are gone. One that comes back
with the id of its last event gets what it has missed, or a snapshot if that is too long ago or of another process.
While nobody watches, the database is asked for sums alone, four times a minute, so that the curve has no gap.
"""

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from poc_gateway import __version__
from poc_gateway.query.web.history import POINT_SECONDS, History
from poc_gateway.query.web.overview import MOST_ROUNDS, Look, Sections, sections
from poc_gateway.query.web.seen import ListObjects, stored, sums
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import is_finished
from poc_operator.clients.errors import StoreError, StoreForbidden
from poc_operator.clients.kube.objects import readable

_log = logging.getLogger(__name__)

#: Seconds from the end of a look to the next; and how many times as long as the look took, if that is longer.
LOOK_SECONDS, REST_FACTOR = 2.0, 4.0
#: A line that says nothing, so that proxies do not take the stream for dead.
BEAT_SECONDS = 15.0
#: Changes that are kept for viewers that come back.
MOST_KEPT = 20


class Viewers:
    """Who watches now, and whether they may go on. Made with the server, which ends them before it ends."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.now = 0
        self.ended = False
        self._changed = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether nobody else may watch."""
        return self.now >= self.most

    def end(self) -> None:
        """Let all streams end; a viewer comes back to whoever serves then."""
        self.ended = True
        self.wake()

    def wake(self) -> None:
        """Wake all that wait in `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, seconds: float) -> None:
        """Wait until there is something new, or for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return


class Feed:
    """What is told, numbered. `run` looks; `stream` is one viewer's."""

    def __init__(self, database: Database, viewers: Viewers, list_objects: ListObjects | None) -> None:
        self._database = database
        self._viewers = viewers
        self._list = list_objects
        self._history = History()
        self._boot = secrets.token_hex(4)
        self._look = Look(now=datetime.now(UTC))
        self._sections: Sections = {}
        self._number = 0
        self._kept = deque[tuple[int, str]](maxlen=MOST_KEPT)
        self._snapshot = (-1, "")
        #: Whether what is told is of the last look for viewers: not after a time without any.
        self.fresh = False

    @property
    def viewers(self) -> Viewers:
        """Who watches."""
        return self._viewers

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look until the block ends."""
        looking = asyncio.create_task(self._run())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])

    async def stream(self, last_id: str | None) -> AsyncGenerator[str]:
        """Yield the events for a viewer that has seen ``last_id``; ends with the server."""
        if self._viewers.full:  # others came in between: the next try is told so
            return
        self._viewers.now += 1
        self._viewers.wake()
        try:
            yield f"retry: {int(1000 * LOOK_SECONDS)}\n\n"
            seen = self._number_of(last_id)
            while not self._viewers.ended:
                if self.fresh and seen != self._number:
                    events, seen = self._events_since(seen), self._number
                    for event in events:
                        yield event
                    continue
                before = monotonic()
                await self._viewers.changed(BEAT_SECONDS)
                if monotonic() - before >= BEAT_SECONDS:
                    yield ": nothing new\n\n"
        finally:
            self._viewers.now -= 1

    def _number_of(self, last_id: str | None) -> int | None:
        boot, _, number = (last_id or "").partition("-")
        return int(number) if boot == self._boot and number.isdecimal() else None

    def _events_since(self, seen: int | None) -> Sequence[str]:
        missed = [(number, event) for number, event in self._kept if seen is not None and number > seen]
        if seen is not None and len(missed) == self._number - seen:
            return [event for _, event in missed]
        if self._snapshot[0] != self._number:
            content = {"sections": self._sections, "points": list(self._history.points)}
            self._snapshot = (self._number, self._event("snapshot", content))
        return [self._snapshot[1]]

    def _event(self, name: str, content: Mapping[str, Any]) -> str:
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
        return f"id: {self._boot}-{self._number}\nevent: {name}\ndata: {text}\n\n"

    async def _run(self) -> None:
        while True:
            watched = self._viewers.now
            try:
                rest = await self._look_once()
            except Exception:
                _log.exception("the web page's look failed: it is tried again")
                rest = POINT_SECONDS
            begun = monotonic()
            # The first viewer does not wait.
            while (left := begun + rest - monotonic()) > 0 and bool(watched) >= bool(self._viewers.now):
                await self._viewers.changed(left)

    async def _look_once(self) -> float:
        """Look, for viewers or for the history alone; return after how many seconds to look again."""
        begun = monotonic()
        if not self._viewers.now:
            self.fresh = False
            try:
                self._history.add(await self._database.read(sums))
            except DatabaseError as error:
                _log.warning("the rate of rounds is not known: %s", error)
            return max(1.0, self._history.due_in())
        problems = list[str]()
        look = await self._of_database(await self._of_cluster(self._look, problems), problems)
        self._look = replace(look, now=datetime.now(UTC), problems=tuple(problems))
        told = await asyncio.to_thread(sections, self._look, self._about())
        has_point = look.stored is not None and self._history.add(
            {one.terms.uid: one.sum("stored") for one in look.stored.rounds}
        )
        self._tell(told, has_point=has_point)
        return max(LOOK_SECONDS, REST_FACTOR * (monotonic() - begun))

    def _about(self) -> dict[str, Any]:
        return {"version": __version__, "since": int(1000 * self._history.began), "most_viewers": self._viewers.most}

    def _tell(self, told: Sections, *, has_point: bool) -> None:
        changed = {name: value for name, value in told.items() if self._sections.get(name) != value}
        gone = [name for name in self._sections if name not in told]
        self._sections = told
        if changed or gone or has_point or not self._number:
            self._number += 1
            content: dict[str, Any] = {"sections": changed, "gone": gone}
            if has_point:
                content["points"] = [self._history.points[-1]]
            self._kept.append((self._number, self._event("changes", content)))
        self.fresh = True
        self._viewers.wake()

    async def _of_database(self, look: Look, problems: list[str]) -> Look:
        try:
            found = await self._database.read(stored)
        except DatabaseError as error:
            problems.append(f"The database does not answer ({error}). Results are as they were seen last.")
            return look
        return replace(look, stored=found, disk_full=self._database.room.full)

    async def _of_cluster(self, look: Look, problems: list[str]) -> Look:
        if self._list is None:
            problems.append("The gateway runs without a cluster: it knows rounds with results alone.")
            return look
        try:
            fleets, rounds = await self._list(PoCFleet), await self._list(PoCRound)
        except StoreForbidden as error:
            problems.append(f"The gateway may not list fleets and rounds ({error}): upgrade the chart's release.")
            return look
        except StoreError as error:
            problems.append(f"The API server does not answer ({error}). Fleets and rounds are as they were seen last.")
            return look
        return replace(look, **await asyncio.to_thread(_parsed, fleets, rounds))


def _parsed(fleets: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # Of a thousand old rounds those that are shown are parsed: each takes milliseconds.
    newest = sorted(rounds, key=lambda body: str(body["metadata"]["creationTimestamp"]), reverse=True)
    newest.sort(key=lambda body: is_finished(body.get("status") or {}))
    return {
        "fleets": tuple(readable(PoCFleet, fleets)),
        "rounds": tuple(readable(PoCRound, newest[:MOST_ROUNDS])),
    }
