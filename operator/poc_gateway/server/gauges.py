# SPDX-License-Identifier: Apache-2.0
"""Series that are read when Prometheus asks: what the database holds, and the jobs of the ML nodes."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Select, and_, func, select

from poc_gateway.metrics import JobKind
from poc_gateway.node_api.service import NodeApi
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.reserve import size_bytes

_log = logging.getLogger(__name__)


class JobGauges(Collector):
    """How many requests for named nonces wait or are computed, of all ML nodes together."""

    def __init__(self, ml_nodes: Sequence[NodeApi]) -> None:
        self._ml_nodes = ml_nodes

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge. Prometheus is served by another thread than the jobs: the counts are of one moment each."""
        found = Counter[tuple[JobKind, str]]()
        for node in self._ml_nodes:
            found.update(node.jobs.counts())
        family = GaugeMetricFamily(
            "poc_gateway_jobs", "Requests for named nonces that have not ended", labels=["kind", "state"]
        )
        for kind in get_args(JobKind):
            for state in ("queued", "running"):
                family.add_metric([kind, state], found[kind, state])
        yield family


class DatabaseGauges(Collector):
    """Gauges of what the database holds, which the process tells that ``owns`` it, and of the process's own writes."""

    def __init__(self, database: Database, owns: Callable[[], bool] = lambda: True) -> None:
        self._database = database
        self._owns = owns

    def describe(self) -> list[Metric]:
        """Name no series in advance: a look into the database just to register would be one too many."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; none while the database cannot be read."""
        owns = self._owns()
        values = dict[str, tuple[str, float]]()
        if owns:
            try:
                with self._database.engine.connect() as connection:
                    values = _values(connection)
            except Exception as error:
                _log.warning("the gauges cannot be read from the database: %s", error)
                return
        values["owner"] = ("Whether this gateway owns the database, and forwards", float(owns))
        waiting = float(self._database.waiting)
        values["waiting_writes"] = ("Writes that wait for the database's one writer", waiting)
        values["disk_full"] = (
            "Whether the disk is full, so that nothing new is stored",
            float(self._database.room.full),
        )
        values |= _volume(self._database)
        for name, (text, value) in values.items():
            yield GaugeMetricFamily(f"poc_gateway_{name}", text, value)


def _volume(database: Database) -> dict[str, tuple[str, float]]:
    size, free = database.room.volume_bytes(), database.room.volume_free_bytes()
    if size is None or free is None:  # PostgreSQL: its volume is another's affair
        return {}
    return {
        "volume_bytes": ("Size of the volume with the SQLite file", float(size)),
        "volume_free_bytes": ("What is left of the volume with the SQLite file", float(free)),
    }


def _values(connection: Connection) -> dict[str, tuple[str, float]]:
    moments = [connection.scalar(query) for query in (_oldest_artifact(), _oldest_late_item(), _oldest_callback())]
    oldest = min((moment for moment in moments if moment is not None), default=None)
    age = 0.0 if oldest is None else max(0.0, time.time() - oldest / 1000)
    late = select(schema.late_items.c.state, func.count()).group_by(schema.late_items.c.state)
    by_state = dict[str, int](connection.execute(late).all())
    dead = by_state.get("refused", 0)
    # int, since PostgreSQL sums up to a Decimal.
    together = int(connection.scalar(select(func.sum(schema.ended_ranges.c.artifacts))) or 0)
    ended = together + sum(count for state, count in by_state.items() if state not in ("waiting", "disputed"))
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
