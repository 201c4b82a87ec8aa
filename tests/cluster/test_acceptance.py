# SPDX-License-Identifier: Apache-2.0
"""The network's acceptance of an ML node, against the gateway, the operator and real vLLM pods."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import ML_NODE, SERVED_NAME
from hack.deploy.releases import PODS
from hack.images.site import ROOT
from tests.cluster.acceptance import FAILED, FRAUD, PASSED, TOKEN
from tests.cluster.gateway import delete_network_rounds, network_of, network_rounds, wait_until_forwarded
from tests.cluster.results import elsewhere, items
from tests.support.fakes.receiver import Receiver

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300, func_only=True)]

#: What the network has of a model, but for its vectors.
REFERENCE: dict[str, Any] = {
    "block_hash": "ac" * 32,
    "block_height": 4712,
    "public_key": "A+reference/key=",
    "params": {"model": SERVED_NAME, "seq_len": 64},
    "stat_test": {"dist_threshold": 0.2, "p_mismatch": 0.1, "fraud_threshold": 0.01},
}
SAMPLE, FORGED = 100, 30
TIMES = ["--window", "8", "--interval", "1", "--limit", "60"]
PORTS = [str(5001 + number) for number in range(PODS)]
#: The path of the ML node, with the version that the network puts into it.
BASE = f"/nodes/{ML_NODE}/v3.0.16"


@dataclass(frozen=True)
class Script:
    """The network's script, run as a process of its own."""

    url: str
    token: str
    folder: Path

    def run(self, reference: dict[str, Any], *options: str, model: str = SERVED_NAME) -> tuple[int, dict[str, Any]]:
        """Return the exit status and the report."""
        path, report = self.folder / "reference.json", self.folder / "report.json"
        path.write_text(json.dumps(reference))
        words = [self.url, model, "--reference", str(path), "--report", str(report), *TIMES, *options]
        argv = [sys.executable, "-m", "tests.cluster.acceptance", *words]
        done = subprocess.run(argv, cwd=ROOT, env={**os.environ, TOKEN: self.token}, timeout=200, check=False)
        told: dict[str, Any] = json.loads(report.read_text())
        return done.returncode, told


@pytest.fixture
def script(kube: Kube, tmp_path: Path) -> Iterator[Script]:
    """The script for the gateway's ML node; rounds that it asked for are removed."""
    delete_network_rounds(kube)
    with network_of(kube) as client:
        token = client.headers["Authorization"].removeprefix("Bearer ")
        yield Script(str(client.base_url.join(BASE)), token, tmp_path)
    delete_network_rounds(kube)


def baked(kube: Kube, script: Script, receiver: Receiver) -> dict[str, Any]:
    """Return a reference with vectors that the pods delivered in phase 3."""
    status, report = script.run(REFERENCE, "--skip", "validate", "--callback-url", receiver.url)
    assert (status, report["result"], report["error"]) == (PASSED, "PASS", None)
    assert (report["phases"]["download"]["before"], report["phases"]["download"]["download"]) == ("DOWNLOADED",) * 2
    assert report["phases"]["deploy"]["is_running"] is True
    rates = report["phases"]["throughput"]["backends"]
    assert list(rates) == PORTS
    assert report["phases"]["throughput"]["nonces_per_second"] == pytest.approx(sum(rates.values()))
    (found,) = network_rounds(kube)
    wait_until_forwarded(kube, found["metadata"]["name"])
    values = sorted((nonce, str(vector)) for nonce, vector in items(receiver.bodies))
    sample = values[:SAMPLE]
    assert len(sample) == SAMPLE
    assert {nonce % PODS for nonce, _ in sample} == set(range(PODS))
    return {**REFERENCE, "artifacts": [{"nonce": nonce, "vector_b64": vector} for nonce, vector in sample]}


def test_the_networks_acceptance_script_accepts_the_pods_and_finds_forged_vectors(
    kube: Kube, script: Script, receiver: Receiver
) -> None:
    reference = baked(kube, script, receiver)

    status, report = script.run(reference)
    assert (status, report["result"], report["error"]) == (PASSED, "PASS", None)
    assert all(rate > 0 for rate in report["phases"]["throughput"]["backends"].values())
    assert report["phases"]["validate"] == {
        "n_total": SAMPLE,
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "fraud_detected": False,
    }

    forged = [
        artifact | {"vector_b64": elsewhere(artifact["vector_b64"], reference["stat_test"])}
        for artifact in reference["artifacts"][:FORGED]
    ]
    foreign = {**reference, "artifacts": forged + reference["artifacts"][FORGED:]}
    status, report = script.run(foreign, "--skip", "download", "--skip", "deploy", "--skip", "throughput")
    assert (status, report["result"], report["error"]) == (FRAUD, "FRAUD", None)
    verdict = report["phases"]["validate"]
    assert (verdict["n_total"], verdict["n_mismatch"]) == (SAMPLE, FORGED)
    assert verdict["mismatch_nonces"] == [artifact["nonce"] for artifact in forged]
    assert verdict["fraud_detected"] is True
    assert 0 <= verdict["p_value"] < reference["stat_test"]["fraud_threshold"]


def test_a_model_that_the_pods_do_not_serve_is_a_hard_error(script: Script) -> None:
    status, report = script.run(REFERENCE, model="org/another")
    assert (status, report["result"]) == (FAILED, "ERROR")
    assert "org/another" in report["error"]
