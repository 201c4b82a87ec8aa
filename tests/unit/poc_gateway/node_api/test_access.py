# SPDX-License-Identifier: Apache-2.0
"""Who may call the routes, and the template without which they have nothing to do."""

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from poc_gateway.errors import install_handlers
from poc_gateway.node_api.pocrounds import RoundTemplate
from poc_gateway.node_api.routes import router
from tests.unit.poc_gateway.node_api.cluster import running_world
from tests.unit.poc_gateway.node_api.requests import INIT, error_of

TOKEN = "secret"  # noqa: S105
TEMPLATE = "namespace: ns\nspec: {selector: {matchLabels: {a: b}}, port: 9000, nodes: {groups: 4}}\n"


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


async def test_without_a_template_the_routes_say_so() -> None:
    app = FastAPI()
    app.include_router(router(None))
    install_handlers(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        answer = await http.get("/api/v1/inference/pow/status")
    assert "POC_GATEWAY_ROUND_TEMPLATE" in error_of(answer, 503, "NotConfigured").detail


def test_a_template_is_read(tmp_path: Path) -> None:
    file = tmp_path / "round.yaml"
    file.write_text(TEMPLATE)
    template = RoundTemplate.load(file)
    assert (template.namespace, str(template.selector), template.port) == ("ns", "a=b", 9000)
    spec = template.spec_of({"nodes": {"first": 1, "last": 1, "count": 2}})
    assert spec["nodes"] == {"first": 1, "last": 1, "count": 2, "groups": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "while parsing"),
        ("namespace: ns", "spec: Field required"),
        ("namespace: ns\nspec: {}", "selector is missing"),
        ("namespace: ns\nspec: {selector: {matchLabels: {a: b}}, rTarget: '1.4'}", "rTarget come with each request"),
        ("namespace: ns\nspec: {selector: {matchLabels: {a: b}}, nodes: {count: 4}}", "nodes may only have groups"),
        ("namespace: ns\nspec: {selector: {}}", "selector is empty and would take every pod"),
        ("namespace: ns\nspec: {selector: {matchLabels: {a: b}}, onBusy: Wait}", "a PoCRound's spec has no onBusy"),
    ],
)
def test_a_wrong_template_is_explained(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "round.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"POC_GATEWAY_ROUND_TEMPLATE=.*round\.yaml") as caught:
        RoundTemplate.load(file)
    assert message in str(caught.value)
