# SPDX-License-Identifier: Apache-2.0
"""The ledger of callbacks: verdicts, and results of jobs, in the transaction of whoever tells of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, insert, select, update

from poc_gateway.outbox.ledger import MOST_VALUES, keep_round, now
from poc_gateway.outbox.states import Event, State, sources, target
from poc_gateway.store.schema import callbacks, rounds

#: A callback that was written within this time goes out before those that have waited for longer.
NEW_MS = 60_000

_IS_WAITING = callbacks.c.state == State.WAITING


def add_verdict(connection: Connection, round_id: int, receiver: str | None, body: str) -> bool:
    """Add a verdict (JSON), to be sent if there is a receiver; False if the round is deleted or being deleted."""
    if not keep_round(connection, round_id):
        return False
    values: dict[str, Any] = {
        "round_id": round_id,
        "url": None if receiver is None else f"{receiver.rstrip('/')}/validated",
        "body": body,
        "state": State.KEPT if receiver is None else State.WAITING,
        "created_at": now(),
    }
    connection.execute(insert(callbacks).values(values))
    return True


def add_job_callbacks(connection: Connection, job_id: str, contents: Sequence[tuple[str, str]]) -> None:
    """Add the callbacks of a job, each a URL and a body (JSON)."""
    common = {"job_id": job_id, "state": State.WAITING, "created_at": now()}
    if contents:
        connection.execute(insert(callbacks), [common | {"url": url, "body": body} for url, body in contents])


def addresses_with_callbacks(connection: Connection) -> Sequence[str]:
    """Return the addresses that callbacks wait for."""
    query = select(callbacks.c.url).where(_IS_WAITING, callbacks.c.url.is_not(None)).distinct()
    return [url for url in connection.scalars(query) if url is not None]


def has_callbacks(connection: Connection, url: str) -> bool:
    """Return whether a callback waits for an address."""
    return connection.scalar(select(callbacks.c.id).where(_IS_WAITING, callbacks.c.url == url).limit(1)) is not None


def senders_of(connection: Connection, url: str, body: str) -> Sequence[tuple[str | None, str | None]]:
    """Return the round's uid or the job's id of each callback with this body (JSON) that waits or was delivered."""
    sent = callbacks.c.state.in_([State.WAITING, State.DELIVERED])
    columns = select(rounds.c.uid, callbacks.c.job_id).outerjoin(rounds, rounds.c.id == callbacks.c.round_id)
    same = columns.where(sent, callbacks.c.url == url, callbacks.c.body == body)
    return [(uid, job_id) for uid, job_id in connection.execute(same)]


def new_callback(connection: Connection, url: str) -> int | None:
    """Return the id of the next callback for an address that was never tried.

    They go out in the order they were written. After an outage the ones that are new come first, since the others may
    be too late already.
    """
    untried = select(callbacks.c.id).where(_IS_WAITING, callbacks.c.url == url, callbacks.c.attempts == 0)
    is_old = callbacks.c.created_at < now() - NEW_MS
    return connection.scalar(untried.order_by(is_old, callbacks.c.id).limit(1))


def callback_to_retry(connection: Connection, url: str, longest_ms: int) -> int | None:
    """Return the id of the callback for an address that failed, and whose pause has been over for longest.

    No pause is longer than ``longest_ms``: one that seems to be was begun before the clock was set back.
    """
    failed = select(callbacks.c.id).where(_IS_WAITING, callbacks.c.url == url, callbacks.c.attempts > 0)
    moment = now()
    due = (callbacks.c.next_try_at <= moment) | (callbacks.c.next_try_at > moment + longest_ms)
    return connection.scalar(failed.where(due).order_by(callbacks.c.next_try_at).limit(1))


class CallbackWork(NamedTuple):
    """A callback that is to be sent: its JSON, how often it has failed, and the Secret of its round's receiver."""

    body: str
    attempts: int
    namespace: str | None
    receiver_secret: str | None


def callback_work(connection: Connection, id_: int) -> CallbackWork | None:
    """Return a callback that waits; None if it has ended, or was deleted with its round or job."""
    columns = select(callbacks.c.body, callbacks.c.attempts, rounds.c.namespace, rounds.c.receiver_secret)
    query = columns.outerjoin(rounds, rounds.c.id == callbacks.c.round_id).where(callbacks.c.id == id_, _IS_WAITING)
    found = connection.execute(query).first()
    return CallbackWork(*found) if found is not None else None


def callback_failed(connection: Connection, id_: int, *, reason: str, next_try_at: int) -> None:
    """Write down that a callback failed, why, and when it is tried again."""
    values = {"attempts": callbacks.c.attempts + 1, "reason": reason, "next_try_at": next_try_at}
    connection.execute(update(callbacks).where(callbacks.c.id == id_, _IS_WAITING).values(values))


def callback_ended(connection: Connection, id_: int, event: Event, reason: str | None = None) -> bool:
    """Write down how a callback ended; False if it has ended already, or there is none."""
    changed = update(callbacks).where(callbacks.c.id == id_, callbacks.c.state.in_(sources(event)))
    ending = {"state": target(event), "reason": reason, "ended_at": now()}
    return connection.execute(changed.values(ending)).rowcount > 0


def replay_callback(connection: Connection, id_: int) -> bool | None:
    """Let a callback that has ended without being delivered wait to be sent again; False if it did not end so.

    None if there is none, or its round is being deleted.
    """
    found = connection.execute(select(callbacks.c.round_id).where(callbacks.c.id == id_)).first()
    if found is None or (found.round_id is not None and not keep_round(connection, found.round_id)):
        return None
    changed = update(callbacks).where(callbacks.c.id == id_, _callback_may(Event.REPLAYED))
    # As if it were new, since else it would expire at once.
    waits = {"state": target(Event.REPLAYED), "ended_at": None, "created_at": now(), "attempts": 0, "next_try_at": 0}
    return connection.execute(changed.values(waits)).rowcount > 0


def abandon_callbacks(connection: Connection, round_id: int, reason: str) -> int:
    """Give up the callbacks of a round that were not delivered; return how many."""
    changed = update(callbacks).where(callbacks.c.round_id == round_id, _callback_may(Event.ABANDONED))
    ending = {"state": target(Event.ABANDONED), "reason": reason, "ended_at": now()}
    return connection.execute(changed.values(ending)).rowcount


def expire_callbacks(connection: Connection, since: int, reason: str) -> int:
    """End some callbacks that have waited since before a moment; return how many, 0 if none is left."""
    overdue = select(callbacks.c.id).where(_callback_may(Event.EXPIRED), callbacks.c.created_at < since)
    ids = connection.scalars(overdue.limit(MOST_VALUES)).all()
    ending = {"state": target(Event.EXPIRED), "reason": reason, "ended_at": now()}
    still = callbacks.c.id.in_(ids) & _callback_may(Event.EXPIRED)
    connection.execute(update(callbacks).where(still).values(ending))
    return len(ids)


def _callback_may(event: Event) -> ColumnElement[bool]:
    return callbacks.c.state.in_(sources(event))
