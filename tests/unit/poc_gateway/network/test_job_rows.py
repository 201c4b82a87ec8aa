# SPDX-License-Identifier: Apache-2.0
"""Jobs in each database."""

import pytest

from poc_gateway.network import job_rows
from poc_gateway.store.database import Database


@pytest.mark.parametrize("odd", ["\0", "\ud800", "\n"])
async def test_whatever_a_pod_says_a_job_ends(database: Database, odd: str) -> None:
    await database.write(lambda connection: job_rows.insert(connection, "job", "{}"))
    ended = job_rows.Outcome("job", error=f"10 pods failed, the last with: CUDA{odd} error")
    await database.write(lambda connection: job_rows.finish(connection, ended))
    row = await database.read(lambda connection: job_rows.find(connection, "job"))
    assert row == job_rows.JobRow("failed", None, "10 pods failed, the last with: CUDA error")
