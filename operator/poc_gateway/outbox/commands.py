# SPDX-License-Identifier: Apache-2.0
"""What is asked of the outbox at a process that may not own the database: written down, and carried out by the owner.

A command is durable before anything of it is done. An owner that ends in the middle of one leaves it to the next, which
does the rest. Its count is written with each change that it counts, so that it is of all of them together. One that
fails again and again is given up, and who asked is told why; one that the database cannot take yet waits.

The owner looks for commands, and for what other processes have stored, about once a second. PostgreSQL could notify it,
but all transactions that notify commit one after the other, and nobody here waits for a second.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any, NamedTuple, Protocol

from pydantic import TypeAdapter
from sqlalchemy import Connection, delete, insert, select, update

from poc_gateway.errors import RETRY_AFTER, Refusal
from poc_gateway.outbox import ledger
from poc_gateway.outbox.forward import Outbox
from poc_gateway.outbox.pace import Trouble, address_of, scope_of, trouble_of
from poc_gateway.outbox.round_sender import url_of
from poc_gateway.outbox.states import State
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.engine import DatabaseAway, DatabaseError
from poc_gateway.store.rounds import KnownRound, by_id
from poc_gateway.store.schema import commands, one_line
from poc_operator.observed import Decision

_log = logging.getLogger(__name__)

#: Seconds between two looks of the owner, and of who waits for a command's end.
LOOK_SECONDS, ANSWER_SECONDS = 0.5, 0.1
#: Who asked waits so long: proxies wait for a minute.
WAIT_SECONDS = 50.0
#: What was done is kept for so long, for those who still wait.
KEEP_SECONDS = 3_600
#: One that fails for another reason than the database is tried so often; of the reason so much is kept.
MOST_FAILURES, ERROR_CHARACTERS = 5, 500
_DECISIONS = TypeAdapter(list[Decision])


class Kind(StrEnum):
    """What is to be done with a round, as the method of `Sending` with this name does it."""

    ABANDON = "abandon"
    REPLAY = "replay"
    DECIDE = "decide"


class Sending(Protocol):
    """What the routes ask of the outbox: the `Outbox` itself, or `Commands` for the owner's."""

    def wake(self) -> None:
        """Look for work soon: something was stored."""

    async def trouble(self, known: KnownRound) -> Trouble:
        """Return what keeps the round from being forwarded."""

    async def abandon(self, known: KnownRound, reason: str) -> int:
        """Give up everything of a round that was not delivered; return how many items that is."""

    async def replay(self, known: KnownRound, state: State) -> int:
        """Send everything of a round again that has ended in ``state``; return how many artifacts that is."""

    async def decide(self, known: KnownRound, decisions: Sequence[Decision]) -> int:
        """Write down which results are honest; return how many decisions were new."""


class _Command(NamedTuple):
    id: int
    round_id: int
    kind: str
    body: str


class Commands:
    """One per process. `obey` runs in the one that owns the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._outbox: Outbox | None = None
        self._news = asyncio.Event()
        self._unknown = set[int]()  # commands of another release that the log tells of

    def wake(self) -> None:
        """Tell the outbox of this process, if it forwards; another's looks for itself."""
        if self._outbox is not None:
            self._outbox.wake()

    async def trouble(self, known: KnownRound) -> Trouble:
        """Return what the owner has written down of a round that has something to send."""
        scopes = [scope_of(known.id), address_of(url_of(known.terms.receiver or ""))]

        def read(connection: Connection) -> Trouble:
            sends = bool(ledger.slots_with_work(connection, known.id))
            return trouble_of(connection, scopes) if sends else Trouble(None, 0.0)

        return await self._database.read(read)

    async def abandon(self, known: KnownRound, reason: str) -> int:
        """Let the owner give up everything of a round that was not delivered; return how many items that is."""
        return await self._ask(known, Kind.ABANDON, {"reason": reason})

    async def replay(self, known: KnownRound, state: State) -> int:
        """Let the owner send everything of a round again that has ended in ``state``; return how many artifacts."""
        return await self._ask(known, Kind.REPLAY, {"state": state})

    async def decide(self, known: KnownRound, decisions: Sequence[Decision]) -> int:
        """Let the owner write down which results are honest; return how many decisions were new."""
        told = _DECISIONS.dump_python(list(decisions), mode="json")
        return await self._ask(known, Kind.DECIDE, {"decisions": told})

    async def _ask(self, known: KnownRound, kind: Kind, body: Mapping[str, Any]) -> int:
        told = {"round_id": known.id, "kind": kind, "body": json.dumps(body)}
        id_ = await self._database.write(partial(_write_down, told=told))
        self._news.set()
        deadline = monotonic() + WAIT_SECONDS
        while monotonic() < deadline:
            done, count, error = await self._database.read(partial(_progress, id_=id_))
            if error is not None:
                raise _given_up(error, count)
            if done:
                return count
            await asyncio.sleep(ANSWER_SECONDS)
        detail = (
            f"this is written down and not done yet: the gateway that forwards does it as soon as it can ({count} "
            "items so far). Look at the round's forwarding, and at the gateways' logs if nothing changes"
        )
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NotDoneYet", detail, headers=RETRY_AFTER)

    async def obey(self, database: Database, outbox: Outbox) -> None:
        """Carry out all commands until cancelled. ``database`` is the owner's, so that nobody else does it as well."""
        self._outbox = outbox
        try:
            while True:
                self._news.clear()
                try:
                    await self._obey(database, outbox)
                except DatabaseError as error:
                    _log.warning("what is asked of the outbox cannot be done yet: %s", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._news.wait()
        finally:
            self._outbox = None

    async def _obey(self, database: Database, outbox: Outbox) -> None:
        for command in await database.read(_open):
            if command.kind not in set(Kind):
                if command.id not in self._unknown:
                    _log.error("command %d waits for a newer gateway: this one cannot %s", command.id, command.kind)
                self._unknown.add(command.id)
                continue
            try:
                await _perform(database, outbox, command)
            except (DatabaseAway, FenceLost):
                raise
            except DatabaseError as error:  # which must not keep the others from being done
                _log.warning("command %d, to %s, cannot be done yet: %s", command.id, command.kind, error)
            except Exception as error:
                _log.exception("command %d, to %s, failed", command.id, command.kind)
                await database.write(partial(_failed, id_=command.id, error=error))


async def _perform(database: Database, outbox: Outbox, command: _Command) -> None:
    known = await database.read(partial(by_id, round_id=command.round_id))
    body, tally = json.loads(command.body), partial(_tally, command.id)
    if known is not None:  # else it is being deleted, and there is nothing to do
        match Kind(command.kind):
            case Kind.ABANDON:
                await outbox.abandon(known, body["reason"], tally)
            case Kind.REPLAY:
                await outbox.replay(known, State(body["state"]), tally)
            case Kind.DECIDE:
                await outbox.decide(known, _DECISIONS.validate_python(body["decisions"]), tally)
    await database.write(partial(_end, id_=command.id))


def _write_down(connection: Connection, told: dict[str, Any]) -> int:
    """Write a command down and return its id; one that waits and says the same is this one, told again."""
    columns = commands.c
    same = [columns[name] == value for name, value in told.items()]
    waiting = select(columns.id).where(columns.ended_at.is_(None), *same).order_by(columns.id).limit(1)
    if (known := connection.scalar(waiting)) is not None:
        return int(known)
    query = insert(commands).values(told | {"created_at": ledger.now()}).returning(columns.id)
    return int(connection.execute(query).scalar_one())


def _open(connection: Connection) -> Sequence[_Command]:
    columns = select(commands.c.id, commands.c.round_id, commands.c.kind, commands.c.body)
    rows = connection.execute(columns.where(commands.c.ended_at.is_(None)).order_by(commands.c.id))
    return [_Command(*row) for row in rows]


def _progress(connection: Connection, id_: int) -> tuple[bool, int, str | None]:
    columns = select(commands.c.ended_at, commands.c.done, commands.c.error)
    row = connection.execute(columns.where(commands.c.id == id_)).first()
    # With its round it was deleted, and there is nothing to do.
    return (row.ended_at is not None, row.done, row.error) if row is not None else (True, 0, None)


def _given_up(error: str, count: int) -> Refusal:
    detail = (
        f"this failed {MOST_FAILURES} times and was given up after {count} items, the last time with: {error}. Correct "
        "what it says and ask again; the log of the gateway that forwards has more"
    )
    return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "CommandFailed", detail)


def _failed(connection: Connection, id_: int, error: Exception) -> None:
    """Count a failure; the command that has failed so often that it will again has ended with it."""
    cause = getattr(error, "orig", None) or error  # of SQLAlchemy's, without the statement
    told = one_line(f"{type(error).__name__}: {cause}")[:ERROR_CHARACTERS]
    failures = {"failures": commands.c.failures + 1}
    counted = update(commands).where(commands.c.id == id_).values(failures).returning(commands.c.failures)
    if (connection.scalar(counted) or 0) >= MOST_FAILURES:
        _end(connection, id_, told)


def _tally(id_: int, connection: Connection, count: int) -> None:
    if count:
        more = {"done": commands.c.done + count}
        connection.execute(update(commands).where(commands.c.id == id_).values(more))


def _end(connection: Connection, id_: int, error: str | None = None) -> None:
    connection.execute(update(commands).where(commands.c.id == id_).values(ended_at=ledger.now(), error=error))
    connection.execute(delete(commands).where(commands.c.ended_at < ledger.now() - KEEP_SECONDS * 1_000))
