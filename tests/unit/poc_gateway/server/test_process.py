# SPDX-License-Identifier: Apache-2.0
"""The process as a whole: how it starts, ends, and says what is wrong with its settings."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from hack.images.site import ROOT
from poc_gateway.server import process
from tests.simulation.gateway_process import gateway
from tests.support.builders.deliveries import artifacts, path, round_body
from tests.support.builders.secrets import ENVIRONMENT, pod_headers
from tests.support.checks.metrics import parse


def test_it_counts_and_ends_in_order(database_url: str, tmp_path: Path) -> None:
    rounds = tmp_path / "rounds.json"
    rounds.write_text(json.dumps([round_body(callbackURL="http://receiver")]))
    with gateway(database_url, rounds, tmp_path / "log", ENVIRONMENT) as running:
        credential = pod_headers()
        for _ in range(2):
            httpx.post(
                running.url + path(), content=artifacts(range(9)), headers=credential, timeout=30
            ).raise_for_status()
        refused = httpx.post(running.url + path(), content=artifacts([10**9]), headers=credential, timeout=30)
        assert refused.status_code == 425
        told = refused.text
        series = parse(httpx.get(running.metrics_url, timeout=30).text)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(10) == 0
    assert (series["poc_gateway_received_total"], series["poc_gateway_stored_total"]) == (18, 9)
    assert (series["poc_gateway_duplicate_total"], series["poc_gateway_conflict_total"]) == (9, 0)
    assert (series["poc_gateway_backlog_artifacts"], series["poc_gateway_dead_artifacts"]) == (9, 0)
    assert 0 < series["poc_gateway_oldest_undelivered_seconds"] < 10
    assert series["poc_gateway_database_bytes"] > 4096
    log = (tmp_path / "log").read_text()
    for secret in (*ENVIRONMENT.values(), credential["Authorization"].removeprefix("Basic ")):
        assert secret not in log + told
    # Whether the receiver, which does not exist, is tried before the end is a matter of speed.
    assert {json.loads(line)["severity"] for line in log.splitlines()} <= {"info", "warn"}


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TOKEN", "", "POC_GATEWAY_TOKEN: is empty: set one secret"),
        (
            "TOKEN",
            "x",
            "POC_GATEWAY_TOKEN is set without POC_GATEWAY_OPERATOR_TOKEN, POC_GATEWAY_CALLBACK_KEY: set all of them",
        ),
        ("PORT", "x", "POC_GATEWAY_PORT: Input should be a valid integer"),
        ("DATABASE", "mysql://h/d", "database is of mysql: only sqlite and postgresql are supported"),
        ("DATABASE", "sqlite:////nowhere/gateway.db", "unable to open database file"),
    ],
)
def test_bad_settings_end_it_with_a_sentence(variable: str, value: str, message: str, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    contexts = [{"name": "c", "context": {"cluster": "c", "user": "c"}}]
    users = [{"name": "c", "user": {}}]
    config = {"clusters": [cluster], "contexts": contexts, "users": users, "current-context": "c"}
    kubeconfig.write_text(json.dumps(config))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}/operator:{ROOT}/image",
        "KUBECONFIG": str(kubeconfig),
        f"POC_GATEWAY_{variable}": value,
    }
    argv = (sys.executable, "-m", "poc_gateway")
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    line = json.loads(done.stderr.splitlines()[-1])
    assert message in line["message"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_is_reached_by_either_protocol(host: str) -> None:
    """A cluster may have IPv4, IPv6 or both."""
    with process._listen(0) as server, socket.create_connection((host, server.getsockname()[1]), timeout=5):
        pass
