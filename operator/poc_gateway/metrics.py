# SPDX-License-Identifier: Apache-2.0
"""All series of the gateway: counters of what arrives and what goes out, and gauges read from the database."""

import logging
import time
from collections.abc import Iterator
from typing import Literal, get_args

from prometheus_client import Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Select, and_, func, select

from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.disk_space import size_bytes

_log = logging.getLogger(__name__)

RECEIVED = Counter("poc_gateway_received", "Artifacts in deliveries that could be read")
STORED = Counter("poc_gateway_stored", "Artifacts stored")
DUPLICATES = Counter("poc_gateway_duplicate", "Artifacts that were stored already, with the same content")
CONFLICTS = Counter("poc_gateway_conflict", "Artifacts that were stored already, with other content")
REFUSED = Counter("poc_gateway_refused", "Artifacts refused", ["reason"])


#: What is sent: an artifact of a round, or a callback row (a verdict, a job's result).
Content = Literal["artifact", "callback"]
#: Why a post was not accepted; ``address`` is one that the settings forbid, ``secret`` one that cannot be had.
FailureKind = Literal["address", "secret", "connection", "timeout", "http_3xx", "http_4xx", "http_5xx"]
_FAILURES: tuple[FailureKind, ...] = get_args(FailureKind)

FORWARDED = Counter("poc_gateway_forwarded", "Results that their receiver has accepted", ["content"])
DEAD = Counter("poc_gateway_dead", "Results that their receiver refused for good", ["content"])
EXPIRED = Counter("poc_gateway_expired", "Results that no receiver accepted in time", ["content"])
FAILURES = Counter("poc_gateway_forward_failures", "Posts to receivers that were not accepted", ["kind"])
OPEN_CIRCUITS = Gauge("poc_gateway_open_circuits", "Addresses of receivers in trouble, tried one post at a time")


def _begin_at_zero() -> None:
    # A series that appears with its first event hides that event from rate().
    content: Content
    for content in ("artifact", "callback"):
        FORWARDED.labels(content)
        DEAD.labels(content)
        EXPIRED.labels(content)
    for kind in _FAILURES:
        FAILURES.labels(kind)


_begin_at_zero()


class DatabaseGauges(Collector):
    """Gauges of what the database holds."""

    def __init__(self, database: Database) -> None:
        self._engine = database.engine
        self._room = database.room

    def describe(self) -> list[Metric]:
        """Name no series in advance: a look into the database just to register would be one too many."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; none while the database cannot be read."""
        try:
            with self._engine.connect() as connection:
                values = _values(connection)
        except Exception as error:
            _log.warning("the gauges cannot be read from the database: %s", error)
            return
        values["disk_full"] = ("Whether the disk is full, so that nothing new is stored", float(self._room.full))
        for name, (text, value) in values.items():
            yield GaugeMetricFamily(f"poc_gateway_{name}", text, value)


def _values(connection: Connection) -> dict[str, tuple[str, float]]:
    moments = [connection.scalar(query) for query in (_oldest_artifact(), _oldest_late_item(), _oldest_callback())]
    oldest = min((moment for moment in moments if moment is not None), default=None)
    age = 0.0 if oldest is None else max(0.0, time.time() - oldest / 1000)
    late = select(schema.late_items.c.state, func.count()).group_by(schema.late_items.c.state)
    by_state = dict[str, int](connection.execute(late).all())
    dead = by_state.get("refused", 0)
    # int, since PostgreSQL sums up to a Decimal.
    together = int(connection.scalar(select(func.sum(schema.ended_ranges.c.artifacts))) or 0)
    ended = together + sum(count for state, count in by_state.items() if state != "waiting")
    pending = connection.scalar(_not_forwarded()) or 0
    return {
        "backlog_artifacts": ("Artifacts that are still to be forwarded", float(pending - ended)),
        "dead_artifacts": ("Artifacts that their receiver refused for good", float(dead)),
        "oldest_undelivered_seconds": ("Age of the oldest result that its receiver has not accepted", age),
        "database_bytes": ("Size of the database", float(size_bytes(connection))),
    }


_FORWARDED_ROUNDS = select(schema.rounds.c.id).where(schema.rounds.c.receiver.is_not(None))


def _not_forwarded() -> Select[int]:
    slots = schema.slots.c
    return select(func.sum(slots.stored - slots.forwarded)).where(slots.round_id.in_(_FORWARDED_ROUNDS))


def _oldest_artifact() -> Select[int]:
    # The first of each slot, which the primary key finds; pods deliver in order.
    slots, artifacts = schema.slots.c, schema.artifacts.c
    first = select(artifacts.received_at).where(artifacts.slot_id == slots.id, artifacts.nonce > slots.forwarded_nonce)
    first_of_slot = first.order_by(artifacts.nonce).limit(1).correlate(schema.slots).scalar_subquery()
    waiting = and_(slots.last_nonce > slots.forwarded_nonce, slots.round_id.in_(_FORWARDED_ROUNDS))
    return select(func.min(first_of_slot)).select_from(schema.slots).where(waiting)


def _oldest_late_item() -> Select[int]:
    return select(func.min(schema.late_items.c.since)).where(schema.late_items.c.state == "waiting")


def _oldest_callback() -> Select[int]:
    return select(func.min(schema.callbacks.c.created_at)).where(schema.callbacks.c.state == "waiting")
