# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a round of a day in small: a gateway in a process of its own is killed while it works."""

from pathlib import Path

import pytest

from benchmarks.day import check, database_of, run
from benchmarks.day_pods import BATCH, SLOTS, Plan
from benchmarks.day_receiver import Audit, artifacts
from poc_gateway.store.database import Database
from poc_gateway.store.schema import artifacts as table

HEIGHT = 7
#: Two batches of each slot.
PLAN = Plan(artifacts=2 * SLOTS * BATCH, kills=2)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
async def test_nothing_is_lost_changed_or_out_of_order(kind: str, tmp_path: Path) -> None:
    with database_of(kind, tmp_path) as url:
        figures = await run(url, tmp_path, PLAN)
        assert (figures["artifacts"], figures["kills"]) == (PLAN.total, PLAN.kills)
        assert figures["conflicts"] == PLAN.kills * BATCH
        # Of each kill, one payload at most.
        assert float(figures["forwarded_twice"]) <= PLAN.kills * 1_000
        assert float(figures["rss_mib_largest"]) < 300
        check(url, PLAN)
        database = Database.open(url)
        try:
            await database.write(lambda one: one.execute(table.delete().where(table.c.nonce == SLOTS)))
        finally:
            database.close()
        with pytest.raises(RuntimeError, match="not every slot"):
            check(url, PLAN)


def payload(first: int, count: int, **fields: object) -> dict[str, object]:
    return {"block_height": HEIGHT, "artifacts": artifacts(range(first, first + 2 * count, 2)), **fields}


@pytest.mark.parametrize(
    ("payloads", "faults", "repeated"),
    [
        ([payload(0, 3), payload(1, 2), payload(6, 1)], 0, 0),
        ([payload(0, 3), payload(0, 5), payload(10, 1)], 0, 3),
        ([payload(0, 3), payload(8, 1)], 1, 0),
        ([payload(0, 3), payload(6, 1), payload(0, 3)], 1, 3),
        ([payload(0, 3, block_height=8)], 1, 0),
        ([{"block_height": HEIGHT, "artifacts": artifacts(range(0, 6, 2))[::-1]}], 1, 0),
        ([{"block_height": HEIGHT, "artifacts": [{"nonce": 0, "vector_b64": "other"}]}], 1, 0),
    ],
)
def test_the_receiver_finds_what_is_wrong(payloads: list[dict[str, object]], faults: int, repeated: int) -> None:
    audit, last = Audit([0, 1]), dict[int, int]()
    for one in payloads:
        audit.take(one, HEIGHT, last)
    assert bool(audit.faults) == bool(faults)
    assert audit.repeated == repeated or faults
