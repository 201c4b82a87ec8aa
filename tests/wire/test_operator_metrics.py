# SPDX-License-Identifier: Apache-2.0
"""A round's metrics as Prometheus scrapes them."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from poc_operator.controller.metrics import serve_metrics
from tests.support.servers.fleet import RoundFleet
from tests.support.servers.http_server import free_port
from tests.wire.test_round import HOSTS, complete, computes, fleet  # noqa: F401 - a fixture


async def scraped(fleet: RoundFleet) -> dict[str, float]:  # noqa: F811 - the fixture's value
    port = free_port()
    async with serve_metrics(fleet.metrics, port, host="127.0.0.1"), httpx.AsyncClient(timeout=30) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = (sample for family in text_string_to_metric_families(answer.text) for sample in family.samples)
    return {"".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


async def test_a_round_with_a_lost_pod(fleet: RoundFleet) -> None:  # noqa: F811
    await fleet.reconcile_until(computes)
    assert (await scraped(fleet))["poc_operator_slotsRunning"] == 2
    await fleet.start_pod(HOSTS[0])
    status = await fleet.reconcile_until(complete)
    metrics = await scraped(fleet)
    assert metrics["poc_operator_nonces_delivered_total"] == status.totals.delivered
    assert metrics["poc_operator_nonces_checked_total"] >= status.totals.checked
    assert metrics["poc_operator_retries_totalRestarted"] == 1
    assert metrics["poc_operator_events_totalCompleted"] == 1
    assert metrics["poc_operator_poll_seconds_count"] == metrics["poc_operator_plan_seconds_count"] > 3
    assert metrics["poc_operator_roundsComplete"] == 1
