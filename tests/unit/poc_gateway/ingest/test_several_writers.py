# SPDX-License-Identifier: Apache-2.0
"""Several processes write to one PostgreSQL: nothing is stored twice, and nobody who reads on misses anything.

Each `Database` here has a writer and connections of its own, as a process has.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Select, func, insert, select, text, update

from poc_gateway.errors import Refusal
from poc_gateway.ingest import validated
from poc_gateway.ingest.authors import Authors
from poc_gateway.ingest.deliveries import CheckedArtifact, Delivery
from poc_gateway.ingest.quotas import Allowance, Limit
from poc_gateway.ingest.storing import Outcome, StoreResult
from poc_gateway.ingest.storing import store as store_all
from poc_gateway.outbox import callback_ledger, ledger
from poc_gateway.outbox.forward import Outbox
from poc_gateway.query.cursor import Positions, positions
from poc_gateway.query.export import Scan
from poc_gateway.query.messages import ArtifactsQuery
from poc_gateway.store import fence, retention
from poc_gateway.store import rounds as rounds_module
from poc_gateway.store.database import Database
from poc_gateway.store.engine import APPLICATION
from poc_gateway.store.rounds import KnownRound, Rounds, by_id, write_down
from poc_gateway.store.schema import artifacts, callbacks, conflicts, late_arrivals, late_items, rounds, slots, verdicts
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.observed import Decision, Truth
from tests.support.builders.deliveries import ROUND, a_round, vector
from tests.support.builders.forwarding import Receiver, running, settings, until
from tests.support.builders.secrets import a_grant

WRITERS, SLOTS, NONCES = 4, 3, 1_500
Ask = Callable[..., Any]

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture
def writers(database: Database, database_url: str) -> Iterator[list[Database]]:
    others = [Database.open(database_url) for _ in range(WRITERS - 1)]
    yield [database, *others]
    for one in others:
        one.close()


async def begin(database: Database, receiver: str | None = None, uid: str = "uid-1") -> KnownRound:
    changes = {} if receiver is None else {"callbackURL": receiver}
    return await database.write(partial(write_down, round_=a_round(uid, groups=SLOTS, **changes)))


def delivery(known: KnownRound, nonces: Sequence[int], value: Callable[[int], bytes] = vector) -> Delivery:
    checked = [CheckedArtifact(known.slots[known.terms.offset_of(nonce)], nonce, value(nonce)) for nonce in nonces]
    return Delivery(known, checked=checked)


async def deliver(
    database: Database, known: KnownRound, nonces: Sequence[int], value: Callable[[int], bytes] = vector
) -> StoreResult | None:
    deliveries = [delivery(known, nonces, value)]
    (result,) = await database.write(lambda one: store_all(one, deliveries, ledger.now()), grows=True)
    assert not isinstance(result, Refusal)
    return result


def another(by: int, nonce: int) -> bytes:
    """The result of another nonce."""
    return vector(nonce + by)


def shuffled(seed: int) -> list[list[int]]:
    """Pieces of all nonces of a round, each nonce in one piece, roughly in order: a piece has some slots' nonces."""
    rng, left, found = random.Random(seed), list(range(NONCES)), list[list[int]]()  # noqa: S311 - no secret
    while left:
        some = left[: rng.randint(1, 60)]
        left = left[len(some) :]
        rng.shuffle(some)
        found.append(some)
    for _ in range(len(found)):
        place = rng.randrange(len(found))
        other = min(len(found) - 1, place + rng.randint(0, 6))
        found[place], found[other] = found[other], found[place]
    return found


def scanned(connection: Connection, known: KnownRound, start: Positions, end: Positions) -> list[int]:
    scan, found = Scan(known, ArtifactsQuery(), start, end), list[int]()
    while not scan.done:
        found += [nonce for _, columns in scan.read(connection) for nonce in columns[0]]
    return found


async def follow(database: Database, known: KnownRound, ended: asyncio.Event) -> Counter[int]:
    """Export again and again, each time what came since."""
    read, last = Counter[int](), False
    reached: Positions = {}
    while not last:
        last = ended.is_set()
        end = await database.read(partial(positions, known=known))
        read.update(await database.read(partial(scanned, known=known, start=reached, end=end)))
        reached = dict(end)
        await asyncio.sleep(0)
    return read


async def test_who_reads_on_gets_each_nonce_once_and_so_does_the_receiver(writers: list[Database]) -> None:
    async with Receiver().served() as receiver:
        known = await begin(writers[0], receiver.url)
        totals = Counter[str]()

        async def write(number: int) -> None:
            # Each nonce comes by two of them.
            for pieces in (shuffled(number), shuffled((number + 1) % WRITERS)):
                for piece in pieces[number % 2 :: 2] if number >= 2 else pieces:
                    result = await deliver(writers[number], known, piece)
                    assert result is not None
                    assert not result.conflicts
                    totals.update(stored=result.stored, duplicates=result.duplicates)

        ended = asyncio.Event()
        async with running(Outbox(writers[0], settings(payload_artifacts=50))):
            following = asyncio.create_task(follow(writers[1], known, ended))
            await asyncio.gather(*(write(number) for number in range(WRITERS)))
            ended.set()
            read = await following
            await until(lambda: len(posted(receiver)) >= NONCES, seconds=30)
            await asyncio.sleep(1.0)
        assert read == Counter(range(NONCES)), "exports that continue where the last one ended"
        assert Counter(posted(receiver)) == Counter(range(NONCES))
        assert totals["stored"] == NONCES
        rows = await writers[0].read(lambda one: one.execute(select(slots).order_by(slots.c.slot)).all())
        assert sum(row.stored for row in rows) == sum(row.forwarded for row in rows) == NONCES
        assert sum(row.duplicates for row in rows) == totals["duplicates"]
        for row in rows:
            assert row.last_nonce == row.forwarded_nonce == max(range(row.slot, NONCES, SLOTS))
            assert row.missing_nonce == row.last_nonce + SLOTS
            of_slot = select(late_arrivals.c.number).where(late_arrivals.c.slot_id == row.id)
            numbers = await writers[0].read(partial(listed, query=of_slot))
            assert sorted(numbers) == list(range(1, row.late + 1))


def listed(connection: Connection, query: Select[int]) -> Sequence[int]:
    return connection.scalars(query).all()


def posted(receiver: Receiver) -> list[int]:
    return [artifact["nonce"] for post in receiver.accepted for artifact in post.body["artifacts"]]


async def test_of_several_results_at_once_the_first_is_kept_and_the_others_beside_it(writers: list[Database]) -> None:
    known = await begin(writers[0], "http://127.0.0.1:9/away")
    nonces = list(range(120))
    for start in range(0, len(nonces), 12):
        some = nonces[start : start + 12]
        found = await asyncio.gather(
            *(deliver(one, known, some, partial(another, 1_000 * n)) for n, one in enumerate(writers))
        )
        assert sum(one.stored for one in found if one is not None) == len(some)
        assert sum(len(one.conflicts) for one in found if one is not None) == (WRITERS - 1) * len(some)
    assert await count(writers[0], artifacts) == len(nonces)
    assert await count(writers[0], conflicts) == (WRITERS - 1) * len(nonces)
    states = await writers[0].read(lambda one: set(one.scalars(select(late_items.c.state))))
    assert (states, await count(writers[0], late_items)) == ({"disputed"}, len(nonces))


async def test_a_rival_that_comes_while_its_nonce_is_sent_is_decided_or_too_late(writers: list[Database]) -> None:
    async with Receiver().served() as receiver:
        known = await begin(writers[0], receiver.url)
        nonces = list(range(600))
        async with running(Outbox(writers[0], settings(payload_artifacts=10))):
            for start in range(0, len(nonces), 30):
                some = nonces[start : start + 30]
                await deliver(writers[1], known, some)
                await deliver(writers[2], known, some[::3], lambda nonce: vector(nonce + 5_000))

            async def idle() -> bool:
                return not await writers[0].read(ledger.rounds_with_work)

            await until(idle, seconds=30)
        sent = Counter(posted(receiver))
        held = await writers[0].read(lambda one: set(one.scalars(select(late_items.c.nonce))))
        assert set(sent.values()) == {1}
        assert held.isdisjoint(sent), "what was sent has no decision to wait for"
        assert held | set(sent) == set(nonces)


async def test_a_round_is_written_down_once(writers: list[Database]) -> None:
    async def read_round(_: str, __: str) -> PoCRound:
        return a_round(groups=SLOTS)

    found = await asyncio.gather(
        *(Rounds(one, read_round).find("ns", "round-uid-1", "uid-1", lambda _: None) for one in writers)
    )
    assert len({one.id for one in found if one is not None}) == 1
    assert await count(writers[0], rounds) == 1


async def test_a_pod_has_one_row(writers: list[Database]) -> None:
    known = await begin(writers[0])
    for number in range(30):
        grant = a_grant(pod=f"pod-{number}")
        ids = await asyncio.gather(*(Authors(one).find(known, grant) for one in writers))
        assert len(set(ids)) == 1
        assert ids[0] is not None


async def test_a_verdict_is_taken_once_and_of_two_the_first_stays(
    writers: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validated, "MOST_VERDICTS", 20)
    known = await begin(writers[0], "http://127.0.0.1:9/away")
    author = await Authors(writers[0]).find(known, a_grant())
    assert author is not None

    def verdict(batch: str, fraud: bool) -> validated.Verdict:
        body = json.dumps(ROUND | {"request_id": batch, "fraud_detected": fraud}).encode()
        return validated.read_verdict(known.terms, body)

    async def tell(database: Database, batch: str, fraud: bool) -> str:
        told = await database.write(partial(validated.add_verdict, known, author, verdict(batch, fraud)))
        return told.body.reason if isinstance(told, Refusal) else str(told)

    for number in range(10):
        answers = await asyncio.gather(*(tell(one, str(number), fraud=False) for one in writers))
        assert answers == ["True"] * WRITERS
    for number in range(10, 15):
        answers = await asyncio.gather(*(tell(one, str(number), n == 0) for n, one in enumerate(writers)))
        # The other three are the same, and one of the two kinds was first.
        assert Counter(answers) in ({"True": 1, "VerdictConflict": 3}, {"True": 3, "VerdictConflict": 1})
    answers = await asyncio.gather(
        *(tell(one, f"{n}-{number}", fraud=False) for n, one in enumerate(writers) for number in range(15, 20))
    )
    assert Counter(answers) == {"True": 5, "TooManyVerdicts": 15}
    assert await count(writers[0], callbacks) == await count(writers[0], verdicts) == 20


async def count(database: Database, table: Any) -> int:  # noqa: ANN401 - any table
    return await database.read(lambda one: one.execute(select(func.count()).select_from(table)).scalar_one())


# What waits for what.


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results = list[Any]()
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


async def test_a_later_delivery_of_a_slot_waits_and_one_of_another_slot_does_not(writers: list[Database]) -> None:
    known = await begin(writers[0])
    with writers[0].engine.connect() as first, first.begin():
        store_all(first, [delivery(known, [3, 6])], 1)
        second = asyncio.create_task(deliver(writers[1], known, [9]))
        assert await asyncio.wait_for(deliver(writers[2], known, [1, 4]), 20) == StoreResult(stored=2)
        assert not second.done(), "its nonce would be seen before those below it"
        assert (await writers[3].read(partial(positions, known=known)))[0].nonce == -1
    assert await asyncio.wait_for(second, 20) == StoreResult(stored=1)


async def test_two_that_reach_the_limit_of_a_round_do_not_wait_for_each_other(
    writers: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await begin(writers[0])
    limit, met, lock_slots = Limit(0, "the test allows none"), threading.Barrier(2, timeout=20), ledger.slots_of

    def refuse(database: Database, nonce: int) -> Outcome:
        allowances = {known.id: Allowance(limit, None, 0.0)}
        with database.engine.begin() as connection:
            connection.execute(text("SET LOCAL deadlock_timeout = '20s'"))  # who waits for the other is seen to
            (outcome,) = store_all(connection, [delivery(known, [nonce])], 1, allowances)
        return outcome

    def meet(connection: Connection, ids: Collection[int]) -> dict[int, ledger.SlotArrivals]:
        found = lock_slots(connection, ids)
        met.wait()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "slots_of", meet)
        begun = time.monotonic()
        found = await asyncio.gather(*(asyncio.to_thread(refuse, writers[n], n) for n in range(2)))
        assert time.monotonic() - begun < 10
    assert all(isinstance(outcome, Refusal) for outcome in found)
    # Alone, or after the other, a later one writes it down.
    await asyncio.to_thread(refuse, writers[0], 2)
    assert await writers[0].read(lambda one: one.scalar(select(rounds.c.limit_reached))) == limit.why


async def test_a_round_is_not_deleted_under_a_delivery(writers: list[Database]) -> None:
    known = await begin(writers[0])
    await writers[0].write(lambda one: one.execute(update(rounds).values(created_at=1)) and None)
    due = retention.deletable(ledger.now(), ledger.now())

    def delete() -> bool:
        with writers[1].engine.begin() as connection:
            return retention.begin(connection, due, known.id)

    with writers[0].engine.connect() as first, first.begin():
        store_all(first, [delivery(known, [0])], ledger.now() + 1_000)
        thread, deleted = in_thread(delete)
        await asyncio.to_thread(thread.join, 0.5)
        assert not deleted
    await asyncio.to_thread(thread.join, 10)
    assert deleted == [False]


async def ended_long_ago(database: Database) -> tuple[KnownRound, dict[str, Callable[[Connection], Any]]]:
    """A round with a dead letter and a callback that was refused, and how each is replayed."""
    known = await begin(database, "http://127.0.0.1:9/away")
    await deliver(database, known, [0])

    def end(connection: Connection) -> int:
        refused = {"slot_id": known.slots[0], "nonce": 0, "state": "refused", "reason": "no", "since": 1}
        connection.execute(insert(late_items).values(refused))
        connection.execute(update(slots).values(heard_at=1, forwarded_nonce=slots.c.last_nonce))
        connection.execute(update(rounds).values(created_at=1))
        assert callback_ledger.add_verdict(connection, known.id, "http://127.0.0.1:9/away", "{}")
        connection.execute(update(callbacks).values(state="refused", created_at=1))
        return int(connection.execute(select(callbacks.c.id)).scalar_one())

    id_ = await database.write(end)
    return known, {
        "dead letter": partial(ledger.replay, round_id=known.id, nonces=None),
        "callback": partial(callback_ledger.replay_callback, id_=id_),
    }


@pytest.mark.parametrize("what", ["dead letter", "callback"])
async def test_a_round_is_not_deleted_under_a_replay(writers: list[Database], what: str) -> None:
    known, replays = await ended_long_ago(writers[0])
    due = retention.deletable(ledger.now(), ledger.now())

    def delete() -> bool:
        with writers[1].engine.begin() as connection:
            return retention.begin(connection, due, known.id)

    with writers[0].engine.connect() as first, first.begin():
        assert replays[what](first) == 1
        thread, deleted = in_thread(delete)
        await asyncio.to_thread(thread.join, 0.5)
        assert not deleted
    await asyncio.to_thread(thread.join, 10)
    assert deleted == [False]


@pytest.mark.parametrize("what", ["dead letter", "callback"])
async def test_a_replay_of_a_round_that_begins_to_be_deleted_finds_nothing(writers: list[Database], what: str) -> None:
    known, replays = await ended_long_ago(writers[0])
    with writers[0].engine.connect() as first, first.begin():
        assert retention.begin(first, retention.deletable(ledger.now(), ledger.now()), known.id)
        replaying = asyncio.create_task(writers[1].write(replays[what]))
        await asyncio.sleep(0.3)
        assert not replaying.done()
    assert await asyncio.wait_for(replaying, 20) is None


async def test_a_delivery_for_a_round_that_begins_to_be_deleted_is_not_stored(writers: list[Database]) -> None:
    known = await begin(writers[0])
    await writers[0].write(lambda one: one.execute(update(rounds).values(created_at=1)) and None)
    with writers[0].engine.connect() as first, first.begin():
        assert retention.begin(first, retention.deletable(ledger.now(), ledger.now()), known.id)
        storing = asyncio.create_task(deliver(writers[1], known, [0]))
        await asyncio.sleep(0.3)
        assert not storing.done()
    assert await asyncio.wait_for(storing, 20) is None


async def test_writes_that_lock_each_other_out_are_tried_again(writers: list[Database]) -> None:
    known = await begin(writers[0])
    met = threading.Barrier(2, timeout=5)

    def lock(connection: Connection, order: Sequence[int]) -> int:
        for place, slot in enumerate(order):
            of_slot = slots.c.id == known.slots[slot]
            connection.execute(update(slots).where(of_slot).values(duplicates=slots.c.duplicates + 1))
            if place == 0 and not met.broken:
                with suppress(threading.BrokenBarrierError):
                    met.wait()
        return len(order)

    one, other = (
        asyncio.create_task(database.write(partial(lock, order=order)))
        for database, order in zip(writers, ([0, 1], [1, 0]), strict=False)
    )
    # The one that is tried again finds nobody at the barrier.
    await asyncio.wait([one, other], timeout=3, return_when=asyncio.FIRST_COMPLETED)
    met.abort()
    assert (await one, await other) == (2, 2)
    found = await writers[0].read(
        lambda connection: list(connection.scalars(select(slots.c.duplicates).order_by(slots.c.slot)))
    )
    assert found == [2, 2, 0]


@pytest.mark.parametrize("how", ["idle", "copy"])
async def test_what_hangs_in_a_transaction_is_ended(
    writers: list[Database], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "HUNG_SECONDS", 0.3)
    known = await begin(writers[0])
    raw = writers[1].engine.raw_connection()
    raw.cursor().execute("SELECT id FROM slots FOR UPDATE")
    if how == "copy":
        copying = raw.cursor().copy("COPY artifacts (slot_id, nonce, received_at) FROM STDIN")
        copying.__enter__()
    storing = asyncio.create_task(deliver(writers[2], known, [0]))
    await asyncio.sleep(0.6)
    assert not storing.done()
    await writers[0].write(fence.end_hung_sessions)
    assert await asyncio.wait_for(storing, 20) == StoreResult(stored=1)
    raw.invalidate()


async def test_what_works_in_a_transaction_is_not_ended(
    writers: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "HUNG_SECONDS", 0.2)
    with writers[1].engine.connect() as connection, connection.begin():
        thread, done = in_thread(lambda: connection.execute(text("SELECT pg_sleep(4)")) and True)
        await asyncio.sleep(0.7)
        await writers[0].write(fence.end_hung_sessions)
        await asyncio.to_thread(thread.join, 20)
        assert done == [True]
        assert connection.execute(text("SHOW application_name")).scalar() == APPLICATION


async def test_what_only_reads_is_not_ended(writers: list[Database], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "HUNG_SECONDS", 0.2)
    known = await begin(writers[0])
    with writers[1].engine.connect() as connection:
        found = positions(connection, known)
        await asyncio.sleep(0.5)
        await writers[0].write(fence.end_hung_sessions)
        assert positions(connection, known) == found


async def test_a_round_that_was_forgotten_for_room_is_found_again(
    writers: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds_module, "MOST_KNOWN", 2)
    for number in range(5):
        await begin(writers[0], uid=f"uid-{number}")
    found = Rounds(writers[1], no_round)
    for _ in range(2):
        for number in range(5):
            one = await found.find("ns", f"round-uid-{number}", f"uid-{number}", lambda _: None)
            assert one is not None
            assert one.terms.uid == f"uid-{number}"
            assert len(found._known) <= 2


async def no_round(_: str, __: str) -> None:
    return None


async def test_a_decision_waits_for_rivals_that_are_being_stored(writers: list[Database]) -> None:
    known = await begin(writers[0], "http://127.0.0.1:9/away")
    await deliver(writers[0], known, [0])
    await deliver(writers[0], known, [0], lambda _: vector(7))
    outbox = Outbox(writers[0], settings())
    decision = Decision(nonce=0, truth=Truth.STORED, up_to=2**40, pod="c")
    with writers[1].engine.connect() as first, first.begin():
        store_all(first, [delivery(known, [0], lambda _: vector(8))], 1)
        deciding = asyncio.create_task(outbox.decide(known, [decision]))
        await asyncio.sleep(0.3)
        assert not deciding.done()
    assert await asyncio.wait_for(deciding, 20) == 1
    assert await writers[0].read(partial(by_id, round_id=known.id)) == known
