# SPDX-License-Identifier: Apache-2.0
"""The series where vLLM answers /metrics from files."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.checks.metrics import parse, parse_pod

PROGRAM = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm_poc.server import metrics
metrics.begin("tiny")
metrics.STATE.labels("GENERATING").set(1)
metrics.PENDING.labels().set(7)
metrics.count_nonces("distance", "round", computed=3, not_finite=1)
metrics.SLICE.labels().observe(0.04)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def expose(folder: Path) -> dict[str, float]:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True, text=True)
    assert all('model_name="tiny"' in name for name in parse(done.stdout))
    return parse_pod(done.stdout, "tiny")


def test_the_multiprocess_registry_has_every_series_once(tmp_path: Path) -> None:
    found = expose(tmp_path)
    assert found['poc_state{state="GENERATING"}'] == 1
    assert found['poc_state{state="VALIDATING"}'] == 0
    assert found["poc_results_pending"] == 7
    assert found['poc_nonces_computed_total{protocol="distance",work="round"}'] == 3
    assert found["poc_slice_seconds_count"] == 1
    assert found["poc_results_delivered_total"] == 0
    again = expose(tmp_path)  # another process, as after a restart
    assert again["poc_results_pending"] == 7
    assert again['poc_nonces_computed_total{protocol="distance",work="round"}'] == 6
    assert not [name for name in again if "pid=" in name]
