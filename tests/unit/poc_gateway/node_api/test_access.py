# SPDX-License-Identifier: Apache-2.0
"""Who may call the routes: whoever has the ML node's token."""

from pathlib import Path

import httpx
import pytest

from tests.unit.poc_gateway.node_api.cluster import running_world
from tests.unit.poc_gateway.node_api.requests import INIT, error_of

TOKEN = "secret"  # noqa: S105


@pytest.mark.parametrize("sent", [None, "Bearer wrong", "Bearer", "Bearer schlüssel", "Basic secret"])
async def test_without_the_token_nothing_is_told(tmp_path: Path, sent: str | None) -> None:
    async with running_world(tmp_path, pods=0, POC_GATEWAY_NETWORK_TOKEN=TOKEN) as world:
        headers = httpx.Headers([] if sent is None else [(b"Authorization", sent.encode())])
        for path in ("state", "inference/pow/status", "pow/status", "pow/generate/5001:x"):
            answer = await world.http.get(f"/api/v1/{path}", headers=headers)
            assert "POC_GATEWAY_NETWORK_TOKEN" in error_of(answer, 401, "Unauthorized").detail
        started = await world.http.post("/api/v1/pow/init/generate", json=INIT, headers=headers)
        assert (started.status_code, world.cluster.rounds) == (401, {})
        known = await world.http.get("/api/v1/state", headers={"Authorization": f"Bearer {TOKEN}"})
        assert known.status_code == 200


async def test_large_bodies_are_refused(tmp_path: Path) -> None:
    async with running_world(tmp_path, pods=0) as world:
        answer = await world.http.post("/api/v1/pow/init/generate", content=b" " * (4 * 2**20 + 1))
        assert "raise POC_GATEWAY_NETWORK_BODY_BYTES" in error_of(answer, 413, "BodyTooLarge").detail
