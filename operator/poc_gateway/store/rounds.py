# SPDX-License-Identifier: Apache-2.0
"""The rounds that the gateway knows: their terms, the rows of their slots, and how a delivery finds its own.

A delivery's round is looked for in memory, then in the database, then as a PoCRound.

A round is written down when its first delivery arrives. From then on the gateway needs the API server no more:
results are collected and forwarded even if the PoCRound is deleted meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Self
from weakref import WeakValueDictionary

from sqlalchemy import Connection, RowMapping, select

from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_operator.apis.v1alpha1.round import PoCRound
from vllm_poc.wire.messages import Protocol
from vllm_poc.wire.partition import NonceSlot

#: Reads a PoCRound by namespace and name; None if there is none. Raises StoreUnavailable and
#: UnreadableObject.
ReadRound = Callable[[str, str], Awaitable[PoCRound | None]]


#: Rounds that are remembered, so that a delivery for one of them need not look for it.
MOST_KNOWN = 256


@dataclass(frozen=True, kw_only=True)
class RoundTerms:
    """A round as its PoCRound describes it.

    ``receiver`` is where its results are forwarded to, if anywhere, and ``receiver_secret`` the name of the Secret with
    its user and password, if it asks for them.
    """

    uid: str
    namespace: str
    name: str
    block_hash: str
    block_height: int
    public_key: str
    protocol: Protocol
    k_dim: int | None
    r_target: float | None
    max_tokens: int | None
    model: str
    seq_len: int
    node_count: int
    n_groups: int
    receiver: str | None
    receiver_secret: str | None

    @classmethod
    def of(cls, round_: PoCRound) -> Self:
        """Read the terms of a round whose slots are fixed."""
        spec, metadata = round_.spec, round_.metadata
        return cls(
            uid=metadata.uid,
            namespace=metadata.namespace,
            name=metadata.name,
            block_hash=spec.block_hash,
            block_height=spec.block_height,
            public_key=spec.public_key,
            protocol=spec.protocol,
            k_dim=spec.artifact.k_dim if spec.artifact is not None else None,
            r_target=float(spec.r_target) if spec.r_target is not None else None,
            max_tokens=spec.decode.max_tokens if spec.decode is not None else None,
            model=spec.model.name,
            seq_len=spec.model.seq_len,
            node_count=spec.nodes.count,
            n_groups=round_.status.groups,
            receiver=spec.callback_url,
            receiver_secret=spec.callback_secret_ref.name if spec.callback_secret_ref is not None else None,
        )

    @property
    def value_bytes(self) -> int | None:
        """Bytes of each result, a vector or a chain; None if they are distances."""
        if self.max_tokens is not None:
            return self.max_tokens + 1
        return None if self.k_dim is None else schema.BYTES_PER_NUMBER * self.k_dim

    def slot(self, offset: int) -> NonceSlot:
        """Return the residue class whose first nonce is ``offset``."""
        group, node = divmod(offset, self.node_count)
        return NonceSlot(node_id=node, node_count=self.node_count, group_id=group, n_groups=self.n_groups)

    def offset_of(self, nonce: int) -> int:
        """Return the first nonce of the slot that ``nonce`` belongs to."""
        return nonce % (self.node_count * self.n_groups)


@dataclass(frozen=True)
class KnownRound:
    """A round, and the rows of its slots by offset."""

    id: int
    terms: RoundTerms
    slots: Mapping[int, int]


#: Raises if a delivery cannot be one of the round, whose rows may not be there yet.
Fits = Callable[[KnownRound], object]


class RoundDeleted(Exception):  # noqa: N818 - reads as a state
    """The round is being deleted for its age, and can begin anew when that is done."""


class Rounds:
    """The rounds of the database, found by uid."""

    def __init__(self, database: Database, read_round: ReadRound) -> None:
        self._database = database
        self._read_round = read_round
        self._known: dict[str, KnownRound] = {}
        # Each as long as somebody holds it: a thousand pods ask for a new round at once.
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    async def find(self, namespace: str, name: str, uid: str, fits: Fits) -> KnownRound | None:
        """Return the round; None if it is not written down and there is no such PoCRound.

        A PoCRound whose slots are not fixed yet is none: no pod has been told of it. A new round is written down if
        ``fits`` does not raise. RoundDeleted while its rows are being deleted, StoreUnavailable if the API server is
        needed and cannot be asked, UnreadableObject if the PoCRound cannot be understood, DatabaseError if the
        database fails.
        """
        if uid not in self._known:
            lock = self._locks.setdefault(uid, asyncio.Lock())
            async with lock:
                await self._learn(namespace, name, uid, fits)
        return self._known.get(uid)

    def forget(self, uid: str) -> None:
        """Forget a round whose rows were deleted."""
        self._known.pop(uid, None)

    async def _learn(self, namespace: str, name: str, uid: str, fits: Fits) -> None:
        if uid in self._known:
            return
        known = await self._database.read(lambda connection: _load_or_raise(connection, uid))
        if known is None:
            round_ = await self._read_round(namespace, name)
            if round_ is None or round_.metadata.uid != uid or not round_.status.groups:
                return
            fits(_unwritten(round_))
            known = await self._database.write(partial(_found_or_written, uid=uid, round_=round_), grows=True)
        self._known[uid] = known
        if len(self._known) > MOST_KNOWN:  # another process may have deleted those that came first
            del self._known[next(iter(self._known))]


def load(connection: Connection, uid: str) -> KnownRound | None:
    """Return the round with this uid, if it is written down and not being deleted."""
    of_uid = select(schema.rounds).where(schema.rounds.c.uid == uid, schema.ROUND_IS_KEPT)
    row = connection.execute(of_uid).mappings().first()
    if row is None:
        return None
    where = schema.slots.c.round_id == row["id"]
    slots = connection.execute(select(schema.slots.c.slot, schema.slots.c.id).where(where))
    return KnownRound(row["id"], terms_of(row), {row.slot: row.id for row in slots})


def by_id(connection: Connection, round_id: int) -> KnownRound | None:
    """Return the round with this id, if it is not being deleted."""
    uid = connection.scalar(select(schema.rounds.c.uid).where(schema.rounds.c.id == round_id))
    return load(connection, uid) if uid is not None else None


def newest(connection: Connection, namespace: str, name: str) -> KnownRound | None:
    """Return the newest round of that name; None if none is written down that is not being deleted."""
    of_name = (schema.rounds.c.namespace == namespace) & (schema.rounds.c.name == name) & schema.ROUND_IS_KEPT
    uid = connection.scalar(select(schema.rounds.c.uid).where(of_name).order_by(schema.rounds.c.id.desc()).limit(1))
    return load(connection, uid) if uid is not None else None


def find(connection: Connection, namespace: str, name: str, uid: str | None) -> KnownRound | None:
    """Return the round of that name with the ``uid``, without one the newest; None if there is none."""
    known = load(connection, uid) if uid is not None else newest(connection, namespace, name)
    return known if known is not None and (known.terms.namespace, known.terms.name) == (namespace, name) else None


def write_down(connection: Connection, round_: PoCRound) -> KnownRound:
    """Write a round and its slots down; its slots are fixed."""
    terms = RoundTerms.of(round_)
    values = {field.name: getattr(terms, field.name) for field in fields(terms)}
    insert = schema.rounds.insert().values(**values, created_at=time.time_ns() // 1_000_000)
    round_id = connection.execute(insert.returning(schema.rounds.c.id)).scalar_one()
    rows = [
        {
            "round_id": round_id,
            "slot": offset,
            "node_id": offset % terms.node_count,
            "group_id": offset // terms.node_count,
            "missing_nonce": offset,
        }
        for offset in _offsets(round_, terms)
    ]
    connection.execute(schema.slots.insert(), rows)
    known = load(connection, terms.uid)
    assert known is not None  # noqa: S101 - written above
    return known


def _found_or_written(connection: Connection, uid: str, round_: PoCRound) -> KnownRound:
    # Another process may have written it down meanwhile.
    return _load_or_raise(connection, uid) or write_down(connection, round_)


def _load_or_raise(connection: Connection, uid: str) -> KnownRound | None:
    known = load(connection, uid)
    begun = select(schema.rounds.c.id).where(schema.rounds.c.uid == uid, ~schema.ROUND_IS_KEPT)
    if known is None and connection.scalar(begun) is not None:
        # The row still has the uid: to write the round down again would fail.
        raise RoundDeleted(uid)
    return known


def _unwritten(round_: PoCRound) -> KnownRound:
    terms = RoundTerms.of(round_)
    return KnownRound(-1, terms, dict.fromkeys(_offsets(round_, terms), -1))


def _offsets(round_: PoCRound, terms: RoundTerms) -> list[int]:
    return [node + group * terms.node_count for group in range(terms.n_groups) for node in round_.spec.nodes.ids]


def terms_of(row: RowMapping) -> RoundTerms:
    """Read the terms from a row of ``rounds``."""
    values = {field.name: row[field.name] for field in fields(RoundTerms)}
    return RoundTerms(**values | {"protocol": Protocol(values["protocol"])})
