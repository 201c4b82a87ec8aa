# SPDX-License-Identifier: Apache-2.0
"""Deleting what nobody needs any more: rounds that are wholly forwarded, or kept here, and old enough.

A round is never deleted while something of it waits to be forwarded, or while the receiver's refusals of it are
younger than the retention: somebody may want to replay them. With an archive, a round is deleted only after all that is
stored of it is in there.

A deletion takes many transactions. The first marks the round, and from then on nothing is stored for it: what is
acknowledged while its rows go would go with them.

What is deleted or expires for its age is found by moments of the wall clock. A clock that was set, by hand or by a
machine whose battery failed, makes young rows old. So `Clock` compares it with a clock that nobody sets, and with the
moment that an earlier process has written down. After a step nothing happens until it has run evenly for long enough.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.reserve import release_free_pages, used_bytes
from vllm_poc.logs import bound

_log = logging.getLogger(__name__)

PERIOD_SECONDS = 60.0
#: Rows that one transaction deletes: deliveries wait for it.
CHUNK_ROWS = 2_000
#: A round that something arrived for within this time runs; even a full database does not delete it.
RUNNING_SECONDS = 3_600
#: What is old by a clock that was set may be young: it must have run evenly for so long before age alone counts.
STEADY_SECONDS = 86_400
#: The two clocks may differ by this between two looks: what is smoothed, or a machine that was suspended for a moment.
TOLERANCE_SECONDS = 60.0
#: A gateway that was off for longer cannot tell that from a clock that was set forward.
MOST_AWAY_SECONDS = 86_400.0
#: The clock is written down this often.
WRITE_SECONDS = 60.0
#: A database that is new has nothing that could be deleted by mistake. One that was migrated is not new.
_FOR_EVER = 100 * 365 * 86_400.0
_MS = 1_000
_COUNTED = (schema.rounds, schema.slots, schema.conflicts, schema.callbacks)
_BEGUN = select(schema.rounds.c.id, schema.rounds.c.uid).where(~schema.ROUND_IS_KEPT)


class Clock:
    """The wall clock of this process, and for how long it has run evenly."""

    def __init__(
        self,
        database: Database,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._wall, self._monotonic = wall, monotonic
        self._last: tuple[float, float] | None = None
        self._steady = 0.0
        self._written = float("-inf")

    async def is_steady(self, seconds: float) -> bool:
        """Compare the clocks; return whether no step was seen for so long. DatabaseError if the database fails."""
        wall, monotonic = self._wall(), self._monotonic()
        if self._last is None:
            stepped = await self._begin(wall)
        else:
            before, passed = self._last[0], monotonic - self._last[1]
            stepped = self._step(wall - before - passed, TOLERANCE_SECONDS, -TOLERANCE_SECONDS)
            self._steady = 0.0 if stepped else self._steady + passed
        self._last = wall, monotonic
        if stepped or monotonic - self._written >= WRITE_SECONDS:
            row = {"id": 1, "seen_at": int(wall * 1000), "steady": int(self._steady * 1000)}
            await self._database.write(lambda connection: _write_clock(connection, row))
            self._written = monotonic
        return self._steady >= seconds

    async def _begin(self, wall: float) -> bool:
        """Go on from what was written down; return whether the clock has stepped since."""
        row = await self._database.read(lambda connection: connection.execute(select(schema.clock)).first())
        if row is None:
            self._steady = _FOR_EVER
            return False
        away = wall - row.seen_at / 1000
        stepped = self._step(away, MOST_AWAY_SECONDS, -TOLERANCE_SECONDS)
        self._steady = 0.0 if stepped else row.steady / 1000 + max(away, 0.0)
        return stepped

    def _step(self, seconds: float, most: float, least: float) -> bool:
        if least <= seconds <= most:
            return False
        _log.error(
            "the clock moved by %.0f s: nothing is deleted or expires until it has run evenly for a while; "
            "correct the clock if it is wrong",
            seconds,
        )
        return True


def _write_clock(connection: Connection, row: dict[str, int]) -> None:
    connection.execute(delete(schema.clock))
    connection.execute(insert(schema.clock).values(row))


class Retention:
    """Deletes rounds, and tells ``forget`` their uids."""

    def __init__(
        self, database: Database, settings: Settings, forget: Callable[[str], None], clock: Clock | None = None
    ) -> None:
        self._database = database
        self._settings = settings
        self._archives = settings.archive_bucket is not None
        self._forget = forget
        self._clock = clock or Clock(database)

    async def run(self) -> None:
        """Sweep once in a while until cancelled; a failure waits for the next sweep."""
        while True:
            try:
                await self.sweep()
            except Exception:
                _log.exception("old rounds could not be deleted, which is tried again in %.0f s", PERIOD_SECONDS)
            await asyncio.sleep(PERIOD_SECONDS)

    async def sweep(self) -> None:
        """Go on with deletions that a process before this one has begun, then delete what is due now."""
        for begun in await self._database.read(lambda one: one.execute(_BEGUN).all()):
            await self._delete(begun)
        now = time.time_ns() // 1_000_000
        kept, limit = self._settings.retention_seconds, self._settings.retention_bytes
        since = now - kept * _MS if kept else 0
        if kept and await self._clock.is_steady(STEADY_SECONDS):
            await self._delete_while(lambda _: True, quiet_since=since, refused_since=since)
        if limit and await self._clock.is_steady(RUNNING_SECONDS):
            running = now - RUNNING_SECONDS * _MS
            await self._delete_while(lambda one: used_bytes(one) > limit, quiet_since=running, refused_since=since)
        while await self._database.write(release_free_pages):
            pass

    async def _delete_while(self, due: Callable[[Connection], bool], *, quiet_since: int, refused_since: int) -> None:
        query = deletable(quiet_since, refused_since)
        if self._archives:
            query = query.where(is_archived())
        while oldest := await self._database.read(lambda one: one.execute(query).first() if due(one) else None):
            # Something may have arrived since: the next sweep finds another round, or none.
            if await self._database.write(partial(begin, may_be=query, round_id=oldest.id)):
                await self._delete(oldest)

    async def _delete(self, round_: Row[int, str]) -> None:
        id_, uid = round_
        while await self._database.write(lambda connection: delete_some(connection, id_)):
            pass
        self._forget(uid)
        with bound(round=uid):
            _log.info("deleted the round, which is no longer kept")


def deletable(quiet_since: int, refused_since: int) -> Select[int, str]:
    """Return the query of rounds that may be deleted, the oldest first.

    Nothing has arrived for them since ``quiet_since``, and nothing was refused since ``refused_since``.
    """
    rounds = schema.rounds.c
    callbacks = schema.callbacks.c
    young = and_(callbacks.state == "refused", callbacks.created_at >= refused_since)
    may_be = and_(has_ended(quiet_since), ~_of_slots(_refused(refused_since)), ~_callback(young))
    return select(rounds.id, rounds.uid).where(may_be).order_by(rounds.created_at).limit(1)


def has_ended(quiet_since: int) -> ColumnElement[bool]:
    """Return the condition that nothing of a round waits any more, and that nothing has arrived since that moment."""
    rounds = schema.rounds.c
    return and_(
        schema.ROUND_IS_KEPT,
        rounds.created_at < quiet_since,
        ~_of_slots(_heard_of(quiet_since)),
        or_(rounds.receiver.is_(None), ~_of_slots(_waits())),
        ~_callback(schema.callbacks.c.state == "waiting"),
    )


def content_version() -> ColumnElement[int]:
    """Return the query of a number that grows with each result, conflict, decision and verdict of a round."""
    rounds, slots, conflicts, callbacks = (table.c for table in _COUNTED)
    of_round = slots.round_id == rounds.id
    results = select(func.coalesce(func.sum(slots.stored + slots.late + slots.conflicts), 0)).where(of_round)
    of_slots = conflicts.slot_id.in_(select(slots.id).where(of_round).correlate(schema.rounds))
    decisions = select(func.count()).where(of_slots, conflicts.truth.is_not(None))
    verdicts = select(func.count()).where(callbacks.round_id == rounds.id)
    counts = [one.correlate(schema.rounds).scalar_subquery() for one in (results, decisions, verdicts)]
    return counts[0] + counts[1] + counts[2]


def is_archived() -> ColumnElement[bool]:
    """Return the condition that all that is stored of a round is in its archive."""
    return func.coalesce(schema.rounds.c.archived_version, 0) == content_version()


def begin(connection: Connection, may_be: Select[int, str], round_id: int) -> bool:
    """Mark a round as being deleted, if ``may_be`` still finds it; return whether it does."""
    of_round = schema.rounds.c.id == round_id
    # Of those who store something for it: they are done, and what they stored is seen, or they find it deleted.
    connection.execute(select(schema.rounds.c.id).where(of_round).with_for_update())
    if connection.execute(may_be.where(of_round)).first() is None:
        return False
    now = time.time_ns() // 1_000_000
    connection.execute(update(schema.rounds).where(of_round).values(deleted_at=now))
    return True


def delete_some(connection: Connection, round_id: int) -> bool:
    """Delete some rows of a round, or the round if it has none left; return whether it is still there.

    It goes slot by slot, and deletes each when it is empty: what was deleted before is not passed again. So a chunk
    takes as long in a large table as in a small one.
    """
    slots, left = schema.slots.c, CHUNK_ROWS
    while left > 0:
        slot = connection.scalar(select(slots.id).where(slots.round_id == round_id).order_by(slots.id).limit(1))
        if slot is None:
            connection.execute(delete(schema.rounds).where(schema.rounds.c.id == round_id))
            return False
        deleted = _delete_rows(connection, schema.artifacts.c.nonce, schema.artifacts.c.slot_id == slot, left)
        if deleted < left:
            late = schema.late_arrivals.c
            deleted += _delete_rows(connection, late.number, late.slot_id == slot, left - deleted)
        left -= deleted
        if left > 0:
            connection.execute(delete(schema.slots).where(slots.id == slot))
    return True


def _delete_rows(connection: Connection, key: ColumnElement[int], of_slot: ColumnElement[bool], most: int) -> int:
    """Delete the first rows of a slot by their key, ``most`` of them at most; return how many."""
    end = connection.scalar(select(key).where(of_slot).order_by(key).limit(1).offset(most))
    some = of_slot if end is None else and_(of_slot, key < end)
    return int(connection.execute(delete(key.table).where(some)).rowcount)


def _of_slots(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    slots, rounds = schema.slots.c, schema.rounds.c
    return exists().where(slots.round_id == rounds.id, condition).correlate(schema.rounds)


def _heard_of(since: int) -> ColumnElement[bool]:
    return schema.slots.c.heard_at >= since


def _waits() -> ColumnElement[bool]:
    # What the outbox itself goes by. Never counts: a commit that was repeated may have counted twice.
    slots, late_items = schema.slots.c, schema.late_items.c
    late = (
        exists()
        .where(late_items.slot_id == slots.id, late_items.state.in_(("waiting", "disputed")))
        .correlate(schema.slots)
    )
    return or_(slots.last_nonce > slots.forwarded_nonce, late)


def _refused(since: int) -> ColumnElement[bool]:
    slots, late_items = schema.slots.c, schema.late_items.c
    young = and_(late_items.slot_id == slots.id, late_items.state == "refused", late_items.since >= since)
    return exists().where(young).correlate(schema.slots)


def _callback(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    callbacks, rounds = schema.callbacks.c, schema.rounds.c
    return exists().where(callbacks.round_id == rounds.id, condition).correlate(schema.rounds)
