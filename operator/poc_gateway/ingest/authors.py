# SPDX-License-Identifier: Apache-2.0
"""Who delivers: each pod of a slot has a row, which its results refer to, and which counts what it must not send."""

import asyncio
import time
from collections import OrderedDict
from contextvars import Context
from functools import partial

from sqlalchemy import Connection, select, update

from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError
from poc_gateway.store.rounds import KnownRound
from poc_gateway.store.schema import ROUND_IS_KEPT, authors, one_line, rounds, slots
from poc_operator.credentials import Grant
from vllm_poc.wire.messages import MAX_TEXT

#: Authors whose ids are remembered; the one that was silent longest is forgotten first.
MOST_REMEMBERED = 20_000
#: Seconds between two writes of what was refused: a pod may send wrong deliveries faster than a database takes them.
REFUSALS_SECONDS = 1.0

#: id of the slot, uid of the pod
_Key = tuple[int, str]


class Authors:
    """The rows of ``authors``. One per process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ids = OrderedDict[_Key, int]()
        self._refused = dict[int, tuple[int, str]]()  # by author: how often since the last write, and why
        self._task: asyncio.Task[None] | None = None

    async def find(self, known: KnownRound, grant: Grant) -> int | None:
        """Return the id of the pod, which gets one at its first delivery; None if the round is deleted or has no such
        slot. DatabaseError if the database fails.
        """
        slot_id = known.slots.get(grant.slot)
        if slot_id is None:
            return None
        key = (slot_id, grant.pod_uid)
        id_ = self._ids.get(key)
        if id_ is None:
            id_ = await self._database.write(partial(_find, slot_id=slot_id, grant=grant), grows=True)
        if id_ is not None:
            self._ids[key] = id_
            self._ids.move_to_end(key)
            if len(self._ids) > MOST_REMEMBERED:
                self._ids.popitem(last=False)
        return id_

    async def refused(self, known: KnownRound, grant: Grant, why: str) -> None:
        """Count a delivery that no pod of the slot may send; it is written down within a moment."""
        author = await self.find(known, grant)
        if author is None:
            return
        count, _ = self._refused.get(author, (0, ""))
        self._refused[author] = (count + 1, why)
        if self._task is None:
            self._task = asyncio.create_task(self._write_refusals(), context=Context())

    async def _write_refusals(self) -> None:
        while self._refused:
            await asyncio.sleep(REFUSALS_SECONDS)
            some, self._refused = self._refused, {}
            try:
                await self._database.write(partial(_add_refusals, some=some))
            except DatabaseError:
                for author, (count, why) in some.items():
                    more, newest = self._refused.get(author, (0, why))
                    self._refused[author] = (count + more, newest)
        self._task = None


def _find(connection: Connection, slot_id: int, grant: Grant) -> int | None:
    is_pod = (authors.c.slot_id == slot_id) & (authors.c.pod_uid == grant.pod_uid)
    known = connection.scalar(select(authors.c.id).where(is_pod))
    kept = select(slots.c.id).join(rounds).where(slots.c.id == slot_id, ROUND_IS_KEPT)
    if known is not None or connection.scalar(kept) is None:
        return known
    values = {"slot_id": slot_id, "pod_uid": grant.pod_uid, "pod": grant.pod, "since": time.time_ns() // 1_000_000}
    id_: int = connection.execute(authors.insert().values(values).returning(authors.c.id)).scalar_one()
    return id_


def _add_refusals(connection: Connection, some: dict[int, tuple[int, str]]) -> None:
    for author, (count, why) in some.items():
        values = {"refused": authors.c.refused + count, "refusal": one_line(why)[:MAX_TEXT]}
        connection.execute(update(authors).where(authors.c.id == author).values(values))
