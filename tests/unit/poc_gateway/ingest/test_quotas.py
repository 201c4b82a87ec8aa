# SPDX-License-Identifier: Apache-2.0
"""A round that has reached its limit stores nothing new, loses nothing, and leaves the others alone."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from poc_gateway import metrics
from poc_gateway.errors import Refusal
from poc_gateway.ingest import quotas
from poc_gateway.ingest.deliveries import CheckedArtifact, Delivery
from poc_gateway.ingest.quotas import Quota
from poc_gateway.ingest.storing import Intake, StoreResult
from poc_gateway.settings import Settings
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.reserve import Room, used_bytes
from poc_gateway.store.rounds import KnownRound, write_down
from tests.support.builders.deliveries import R_TARGET, a_round, artifacts, distances, encoded, vector
from tests.support.fakes.held_write import HeldWrite
from tests.unit.poc_gateway.ingest.conftest import Gateway, Start, receipt

#: What the chart asks for, and the largest round of a day.
VOLUME, LARGEST_ROUND = 20 * 2**30, 20_000_000
DISK = 16 * 2**20


async def limit_reached(gateway: Gateway, uid: str = "uid-1") -> str | None:
    _, told = await gateway.get(f"/rounds/ns/round-{uid}/progress")
    _, detail = await gateway.get(f"/rounds/ns/round-{uid}")
    assert detail["round"]["limit_reached"] == told["limit_reached"]
    found: str | None = told["limit_reached"]
    return found


async def test_beyond_its_limit_a_round_stores_nothing_new(start: Start) -> None:
    series = metrics.REFUSED.labels("RoundFull")._value, metrics.HTTP_REFUSALS.labels("RoundFull")._value
    before = [one.get() for one in series]
    async with start(a_round(), a_round("uid-2"), round_results=10) as gateway:
        assert await gateway.deliver(artifacts(range(8))) == (200, receipt(stored=8))
        assert await limit_reached(gateway) is None
        status, body = await gateway.deliver(artifacts(range(6, 11)))
        assert (status, body["reason"]) == (507, "RoundFull")
        assert "the round ns/round-uid-1 (uid-1), which may store 2 more" in body["detail"]
        assert "gateway.limits.resultsPerRound (POC_GATEWAY_ROUND_RESULTS) allows 10" in body["detail"]
        assert [one.get() - past for one, past in zip(series, before, strict=True)] == [5, 1]
        assert "resultsPerRound" in (await limit_reached(gateway) or "")
        # What is there is taken again, also with other content, and other rounds go on.
        assert await gateway.deliver(artifacts(range(8))) == (200, receipt(duplicates=8))
        other = [{"nonce": 3, "vector_b64": encoded(4)}]
        assert await gateway.deliver(artifacts([], artifacts=other)) == (200, receipt(conflicts=1))
        assert "resultsPerRound" in (await limit_reached(gateway) or "")
        assert await gateway.deliver(artifacts(range(10)), uid="uid-2") == (200, receipt(stored=10))
        # As many as fit are stored, and from then on none.
        assert await gateway.deliver(artifacts(range(7, 10))) == (200, receipt(stored=2, duplicates=1))
        assert (await gateway.deliver(artifacts([10])))[0] == 507
        stored = [row.nonce for row in await gateway.rows(schema.artifacts)]
        assert sorted(stored) == sorted([*range(10), *range(10)])
    # A process with another limit stores what pods have kept.
    async with start(a_round(), round_results=20) as gateway:
        assert "resultsPerRound" in (await limit_reached(gateway) or "")
        assert await gateway.deliver(artifacts([10, 11])) == (200, receipt(stored=2))
        assert await limit_reached(gateway) is None


async def test_without_limits_no_round_has_reached_one(start: Start) -> None:
    async with start(a_round(), round_results=10) as gateway:
        assert (await gateway.deliver(artifacts(range(20))))[0] == 507
        assert "resultsPerRound" in (await limit_reached(gateway) or "")
    async with start(a_round(), round_results=0, round_volume_percent=0) as gateway:
        assert await gateway.deliver(artifacts(range(20))) == (200, receipt(stored=20))
        assert await limit_reached(gateway) is None
        _, listed = await gateway.get("/rounds")
        _, summary = await gateway.get("/rounds/ns/round-uid-1/summary")
        assert [one["limit_reached"] for one in (*listed["rounds"], summary["round"])] == [None, None]


async def test_one_round_does_not_fail_those_that_share_its_transaction(start: Start) -> None:
    full, others = a_round(), [a_round(f"uid-{number}") for number in range(2, 6)]
    async with start(full, *others, round_results=5) as gateway:
        assert (await gateway.deliver(artifacts(range(5))))[0] == 200
        bodies = [(artifacts([5 + place]), "uid-1") for place in range(4)]
        bodies += [(artifacts(range(4)), one.metadata.uid) for one in others]
        answers = await asyncio.gather(*(gateway.deliver(body, uid=uid) for body, uid in bodies))
        assert [status for status, _ in answers] == [507] * 4 + [200] * 4


async def test_distances_have_limits_too(start: Start) -> None:
    async with start(a_round(rTarget=str(R_TARGET)), round_results=2) as gateway:
        assert (await gateway.deliver(distances([(1, 0.1), (9, 0.2)])))[0] == 200
        assert (await gateway.deliver(distances([(11, 0.1)])))[0] == 507


async def test_without_limits_nothing_is_counted(start: Start) -> None:
    async with start(a_round(), round_results=0, round_volume_percent=0) as gateway:
        assert (await gateway.deliver(artifacts(range(100))))[0] == 200


async def a_life(database: Database, seed: int, limit: int) -> None:
    """Pods deliver at random until everything was taken or refused twice; what was acknowledged is what is stored."""
    random = Random(seed)  # noqa: S311
    quota = Quota(database.room, results=limit, percent=0)
    intake, rounds = Intake(database, quota), list[KnownRound]()
    for number in range(2):
        round_ = a_round(f"uid-{seed}-{limit}-{number}-{random.random()}")
        rounds.append(await database.write(lambda connection, one=round_: write_down(connection, one)))  # type: ignore[misc]
    taken: dict[int, set[int]] = {known.id: set() for known in rounds}

    async def deliver(known: KnownRound, nonces: list[int]) -> None:
        delivery = Delivery(known, checked=[CheckedArtifact(known.slots[0], n, vector(n)) for n in nonces])
        outcome = await intake.store(delivery)
        new = set(nonces) - taken[known.id]
        if isinstance(outcome, StoreResult):
            taken[known.id] |= new
            assert len(taken[known.id]) <= limit
        else:
            assert len(taken[known.id] | set(nonces)) > limit, "what fits is not refused"

    for _ in range(15):
        sizes = [random.randrange(1, 6) for _ in range(random.randrange(1, 4))]
        batches = [[random.randrange(30) for _ in range(size)] for size in sizes]
        # Of one round at a time, so that the order of the answers is that of the deliveries.
        for known in rounds:
            for nonces in batches:
                await deliver(known, nonces)
    columns = schema.slots.c
    for known in rounds:
        found = await database.read(
            lambda one, id_=known.slots[0]: one.execute(  # type: ignore[misc]
                schema.artifacts.select().where(schema.artifacts.c.slot_id == id_)
            ).all()
        )
        assert {row.nonce for row in found} == taken[known.id]
        slot = await database.read(
            lambda one, id_=known.slots[0]: one.execute(schema.slots.select().where(columns.id == id_)).one()  # type: ignore[misc]
        )
        assert slot.stored == len(found)


@hypothesis_settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 35))
def test_what_is_acknowledged_is_stored_and_never_more_than_the_limit(
    database: Database, seed: int, limit: int
) -> None:
    asyncio.run(a_life(database, seed, limit))


async def test_a_slot_that_fills_its_part_leaves_the_others_theirs(start: Start) -> None:
    """A pod that makes results up is not the end of its round: the others have their share, and it is named."""
    async with start(a_round(groups=2), round_results=40) as gateway:
        assert await gateway.deliver(artifacts(range(1, 61, 2)[:30])) == (200, receipt(stored=30))
        status, body = await gateway.deliver(artifacts([61]))
        assert (status, body["reason"]) == (507, "RoundFull")
        assert "which may store 0 more of this slot" in body["detail"]
        for begin in range(0, 20, 4):
            assert await gateway.deliver(artifacts([begin, begin + 2])) == (200, receipt(stored=2))
            told = await limit_reached(gateway) or ""
            assert "Slot 1 has most" in told, "it does not go away while the slot is refused"
        assert (await gateway.deliver(artifacts([100])))[0] == 507, "the round is full"
        stored = [row.nonce for row in await gateway.rows(schema.artifacts)]
        assert (len(stored), len([nonce for nonce in stored if nonce % 2])) == (40, 30)


@hypothesis_settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 60), slots=st.integers(2, 5))
def test_whatever_a_slot_delivers_the_others_can_store_their_share(
    database: Database, seed: int, limit: int, slots: int
) -> None:
    async def life() -> None:
        random, taken = Random(seed), Counter[int]()  # noqa: S311
        round_ = a_round(f"uid-{seed}-{limit}-{slots}-{random.random()}", groups=slots)
        known = await database.write(lambda connection: write_down(connection, round_))
        intake = Intake(database, Quota(database.room, results=limit, percent=0))
        share = limit // (2 * slots)
        for _ in range(40):
            slot, size = random.choice([0, 0, 0, *range(slots)]), random.randrange(1, 6)
            nonces = [slot + slots * (taken[slot] + number) for number in range(size)]
            delivery = Delivery(known, checked=[CheckedArtifact(known.slots[slot], n, vector(n)) for n in nonces])
            outcome = await intake.store(delivery)
            if isinstance(outcome, StoreResult):
                taken[slot] += size
            else:
                assert taken[slot] + size > share, "its share is its own"
            assert taken.total() <= limit
            assert taken[slot] <= limit - (slots - 1) * share

    asyncio.run(life())


async def test_a_crowd_of_pods_does_not_exceed_the_limit_together(database: Database) -> None:
    known = await database.write(lambda connection: write_down(connection, a_round()))
    intake = Intake(database, Quota(database.room, results=50, percent=0))

    async def deliver(begin: int) -> Any:  # noqa: ANN401
        nonces = range(begin, begin + 8)
        return await intake.store(
            Delivery(known, checked=[CheckedArtifact(known.slots[0], n, vector(n)) for n in nonces])
        )

    outcomes = await asyncio.gather(*(deliver(begin) for begin in range(0, 400, 8)))
    stored = [one.stored for one in outcomes if isinstance(one, StoreResult)]
    assert sum(stored) == 48


async def test_deliveries_wait_for_no_reader(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "COUNT_SECONDS", 0.0)
    known = await database.write(lambda connection: write_down(connection, a_round()))
    intake = Intake(database, Quota(database.room, results=5, percent=0))

    async def deliver(begin: int) -> Any:  # noqa: ANN401
        nonces = range(begin, begin + 2)
        return await intake.store(
            Delivery(known, checked=[CheckedArtifact(known.slots[0], n, vector(n)) for n in nonces])
        )

    held = HeldWrite()
    readers = [asyncio.create_task(database.read(held)) for _ in range(8)]
    try:
        await held.begun()
        async with asyncio.timeout(20):
            assert await deliver(0) == StoreResult(stored=2)
            assert await deliver(2) == StoreResult(stored=2)
            assert isinstance(await deliver(4), Refusal)
    finally:
        held.release.set()
        await asyncio.gather(*readers)


class _Volume(Room):
    def volume_bytes(self) -> int | None:
        return VOLUME


@pytest.mark.parametrize("k_dim", [None, 12, 64])
def test_the_defaults_have_room_for_the_largest_round(k_dim: int | None, tmp_path: Path) -> None:
    defaults = Settings()
    room = _Volume(None, tmp_path)
    quota = Quota(room, results=defaults.round_results, percent=defaults.round_volume_percent)
    assert quota.limit(k_dim).results > LARGEST_ROUND


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system, for which the test needs the rights of root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


async def test_a_round_takes_no_more_than_its_share_of_a_volume(disk: Path) -> None:
    database = Database.open(f"sqlite:///{disk}/gateway.db")
    try:
        known = await database.write(lambda connection: write_down(connection, a_round()))
        empty = await database.read(used_bytes)
        intake, stored = Intake(database, Quota(database.room, results=0, percent=25)), 0
        for begin in range(0, 100_000, 500):
            nonces = range(begin, begin + 500)
            outcome = await intake.store(
                Delivery(known, checked=[CheckedArtifact(known.slots[0], n, vector(n)) for n in nonces])
            )
            if not isinstance(outcome, StoreResult):
                break
            stored += outcome.stored
        assert outcome is not None
        assert not isinstance(outcome, StoreResult)
        assert "gateway.limits.volumePercentPerRound" in outcome.body.detail
        assert "25 % of the volume" in outcome.body.detail
        taken = await database.read(used_bytes) - empty
        assert DISK / 16 < taken <= DISK / 4, stored
    finally:
        database.close()
