# SPDX-License-Identifier: Apache-2.0
"""Every request is counted and timed by its route, and has a line in the log if the settings say so."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from poc_gateway.metrics import RequestRecord
from poc_gateway.server import telemetry
from poc_gateway.server.telemetry import AccessLog, Request
from poc_gateway.settings import AccessLogMode
from tests.simulation.gateway_process import GatewayProcess, gateway
from tests.support.builders.deliveries import artifacts, path, round_body
from tests.support.builders.secrets import ENVIRONMENT, PEOPLE, TOKEN, a_grant, pod_headers
from tests.support.checks.metrics import parse

SECRET = "secret-of-a-query"  # noqa: S105 - guards nothing
GENERATED = "/callbacks/{namespace}/{name}/{uid}/generated"
_SERIES = re.compile(r'poc_gateway_http_requests_total\{method="(\w+)",port="(\w+)",route="([^"]+)",status="(\d+)"\}')


def ml_nodes(folder: Path) -> dict[str, str]:
    """Settings with an ML node; the gateways here have no pods for it."""
    file = folder / "ml-nodes.json"
    template = {"namespace": "ns", "spec": {"selector": {"matchLabels": {"a": "b"}}}}
    file.write_text(json.dumps([{"name": "a", "template": template}]))
    return {"POC_GATEWAY_ML_NODES": str(file)}


def ask_all(running: GatewayProcess, credential: dict[str, str]) -> None:
    """Ask with paths, methods, queries and tokens that must not be told."""
    with httpx.Client(timeout=30) as client:
        client.post(running.url + path(), content=artifacts(range(9)), headers=credential)
        client.post(running.url + path(), content=artifacts([1]), headers={"Authorization": "Basic c2VjcmV0"})
        for number in range(20):
            client.get(f"{running.url}/rounds/ns/round-{number}/summary?uid={SECRET}", headers=PEOPLE)
            client.get(f"{running.url}/nothing/{number}", headers=PEOPLE)
            client.request("PROPFIND", f"{running.url}/rounds", headers=PEOPLE)
            client.get(f"{running.network_url}/nodes/a/v3.0.{number}/api/v1/state")
            client.post(f"{running.network_url}/v1/chat/completions/{number}?key={SECRET}", json={})
        client.get(f"{running.url}/rounds", headers=PEOPLE | {"X-Request-Id": "mine-1"})


def answered(series: dict[str, float]) -> dict[tuple[str, ...], float]:
    """Requests by method, port, route and status."""
    found = ((_SERIES.fullmatch(name), value) for name, value in series.items())
    return {match.groups(): value for match, value in found if match is not None}


def is_probe(key: tuple[str, ...]) -> bool:
    """Whether these are requests of who waits for the gateway, which stands by at first and has no routes yet."""
    _, _, route, status = key
    return route == "/readyz" or (route, status) == ("none", "503")


def key_of(line: dict[str, Any]) -> tuple[str, ...]:
    return line["method"], line["port"], line["route"], str(line["status"])


def lines(log: Path) -> list[dict[str, Any]]:
    """The lines about requests, without those of probes."""
    read = (json.loads(line) for line in log.read_text().splitlines())
    return [line for line in read if line["logger"] == telemetry.LOGGER and not is_probe(key_of(line))]


def run_with(mode: AccessLogMode, folder: Path) -> tuple[dict[str, float], Path, str]:
    """Ask a gateway; its series, its log and the credential that was sent."""
    rounds, log = folder / "rounds.json", folder / "log"
    rounds.write_text(json.dumps([round_body()]))
    settings = ENVIRONMENT | ml_nodes(folder) | {"POC_GATEWAY_ACCESS_LOG": mode}
    credential = pod_headers(a_grant(rate=1_000))
    with gateway(f"sqlite:///{folder}/gateway.db", rounds, log, settings) as running:
        ask_all(running, credential)
        series = parse(httpx.get(running.metrics_url, timeout=30).text)
        running.process.terminate()
        assert running.process.wait(20) == 0
    return series, log, credential["Authorization"].removeprefix("Basic ")


def test_requests_are_told_by_their_routes_and_without_secrets(tmp_path: Path) -> None:
    series, log, credential = run_with("all", tmp_path)
    found = answered(series)
    network = "/api/v1/state"
    assert {key: value for key, value in found.items() if not is_probe(key)} == {
        ("POST", "inside", GENERATED, "200"): 1,
        ("POST", "inside", GENERATED, "401"): 1,
        ("GET", "inside", "/rounds/{namespace}/{name}/summary", "404"): 20,
        ("GET", "inside", "none", "404"): 20,
        ("other", "inside", "/rounds", "405"): 20,
        ("GET", "inside", "/rounds", "200"): 1,
        ("GET", "network", network, "200"): 20,
        ("POST", "network", "/v1/{path}", "503"): 20,
    }
    count = "poc_gateway_http_request_seconds_count"
    assert series[f'{count}{{port="network",route="{network}",status="2xx"}}'] == 20
    assert series[f'{count}{{port="network",route="/v1/{{path}}",status="5xx"}}'] == 20
    assert series['poc_gateway_http_refusals_total{reason="Unauthorized"}'] == 1
    assert series['poc_gateway_http_refusals_total{reason="NoBackends"}'] == 20
    assert series['poc_gateway_http_refusals_total{reason="Busy"}'] == 0
    assert series["poc_gateway_commit_seconds_count"] >= 2
    assert (series["poc_gateway_waiting_artifacts"], series["poc_gateway_waiting_writes"]) == (0, 0)
    told = lines(log)
    assert len(told) == sum(found.values()) - sum(value for key, value in found.items() if is_probe(key))
    for secret in (SECRET, credential, TOKEN, "c2VjcmV0", "round-7", "completions"):
        assert secret not in "".join(map(str, told)), secret
    (delivery,) = [line for line in told if key_of(line) == ("POST", "inside", GENERATED, "200")]
    assert (delivery["received_bytes"], delivery["peer"]) == (len(artifacts(range(9))), "127.0.0.1")
    assert 0 < delivery["seconds"] < 20
    assert delivery["sent_bytes"] > 20
    assert [line["route"] for line in told if line["request"] == "mine-1"] == ["/rounds"]


def test_errors_alone_have_a_line(tmp_path: Path) -> None:
    _, log, _ = run_with("errors", tmp_path)
    assert {line["status"] for line in lines(log)} == {401, 404, 405, 503}


def test_no_request_has_a_line(tmp_path: Path) -> None:
    _, log, _ = run_with("none", tmp_path)
    assert lines(log) == []


def a_request(status: int = 200) -> Request:
    record = RequestRecord(route="/rounds", status=status, received=1, sent=2)
    return Request("inside", "GET", record, 0.25, "10.0.0.1", "r-1")


async def test_plain_lines_have_what_they_are_about_in_brackets() -> None:
    written = list[str]()
    log = AccessLog("all", "plain", written.append)
    log.add(a_request())
    log.flush()
    about = "[request=r-1 port=inside seconds=0.250000 received_bytes=1 sent_bytes=2 peer=10.0.0.1]"
    assert "".join(written).endswith(f" INFO poc_gateway.access: GET /rounds 200 {about}\n")


async def test_a_log_that_is_slow_holds_up_nobody_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MOST_LINES", 10)
    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 0.01)
    written, may_go_on = list[str](), asyncio.Event()
    loop = asyncio.get_running_loop()

    def write(text: str) -> None:
        asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result(20)
        written.append(text)

    log = AccessLog("all", "json", write)
    for _ in range(25):
        log.add(a_request())
    may_go_on.set()
    async with asyncio.timeout(20):
        while not written:  # noqa: ASYNC110 - a thread writes
            await asyncio.sleep(0.01)
    told = [json.loads(line) for line in "".join(written).splitlines()]
    assert len(told) == 11
    assert told[-1]["message"] == "15 requests have no line: they came faster than lines are written"


def test_no_series_of_requests_has_a_label_without_bound() -> None:
    names = {"port", "method", "route", "status", "le", "reason"}
    found = {
        label
        for family in REGISTRY.collect()
        if family.name.startswith("poc_gateway_http")
        for sample in family.samples
        for label in sample.labels
    }
    assert found <= names
