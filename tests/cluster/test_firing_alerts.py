# SPDX-License-Identifier: Apache-2.0
"""Faults that are injected into the cluster raise their alerts within three minutes.

When the pods are ready, rounds begin. What operator, gateways and pods tell of themselves is read every 15 seconds from
then on, as Prometheus would. promtool judges it by the rules that the chart renders.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from hack.deploy.kube import Kube
from hack.deploy.releases import GATEWAY, OPERATOR, SYSTEM_NAMESPACE
from hack.toolchain.common import UserError
from tests.cluster.faulty import LABEL, NAMESPACE
from tests.cluster.test_injected_faults import inject, make_rounds, remove
from tests.monitoring.rendered import ensure, judge, write_rules

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900, func_only=True)]

EVERY, SECONDS = 15, 180
METRICS_PORT, HTTP_PORT = 8081, 8000
#: Which alert each fault raises, with the reason that its labels have, if any. A slow API server raises none: nothing
#: is lost by it, and who runs the cluster has alerts of its own.
ALERTS = {
    "wrong token": ("PoCRoundsIdle", "PodsUnreachable"),
    "full disk": ("PoCGatewayDiskFull", ""),
    "receiver away": ("PoCReceiverUnreachable", ""),
    "sick GPU vectors": ("PoCFleetDegraded", "SelfCheckFailed"),
    "hung engine": ("PoCWorkDegraded", "SlotsStalled"),
    "crash loop": ("PoCFleetDegraded", "PodsFailing"),
    "poison round": ("PoCRoundFailed", "BackoffLimitExceeded"),
    "missing PVC": ("PoCFleetDegraded", "PodsUnschedulable"),
    "wrong model name": ("PoCRoundsIdle", "ModelMismatch"),
    "network policy in the way": ("PoCRoundsIdle", "PodsUnreachable"),
    "expired certificate": ("PoCGatewayCertificateExpired", ""),
}

#: What is scraped: where it runs, the label of its pods, and the port.
TARGETS = [
    (SYSTEM_NAMESPACE, f"app.kubernetes.io/name={OPERATOR}", METRICS_PORT),
    (SYSTEM_NAMESPACE, f"app.kubernetes.io/name={GATEWAY}", METRICS_PORT),
    (NAMESPACE, f"app.kubernetes.io/name={GATEWAY}", METRICS_PORT),
    (NAMESPACE, f"{LABEL}=hung", HTTP_PORT),
]

#: Samples of each series, by their numbers.
Samples = dict[str, dict[int, float]]


def _series(text: str, pod: str) -> Iterator[tuple[str, float]]:
    """Yield what a process tells, with the labels that Prometheus adds. The rules are about the chart's namespace."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {**sample.labels, "namespace": SYSTEM_NAMESPACE, "pod": pod}
            listed = ", ".join(f'{key}="{value}"' for key, value in labels.items())
            yield f"{sample.name}{{{listed}}}", sample.value


def _scrape(kube: Kube, begin: float, number: int, found: Samples) -> None:
    for namespace, label, port in TARGETS:
        pods = kube.get("pods", "-n", namespace, "-l", label)["items"]
        for pod in (body["metadata"]["name"] for body in pods):
            path = f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/metrics"
            try:
                text = kube.kubectl("get", "--raw", path)
            except UserError:
                continue  # it starts, or has ended
            for name, value in _series(text, pod):
                # The time of promtool begins at 0.
                found[name][number] = value - begin if "_timestamp_seconds{" in name else value


@pytest.fixture(scope="module")
def samples(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Samples]:
    """What was scraped in the three minutes after the faults."""
    remove(kube)
    kube.ensure_namespace(NAMESPACE, {})
    inject(kube, tmp_path_factory.mktemp("certificate"))
    kube.kubectl("-n", NAMESPACE, "wait", "pod", "-l", LABEL, "--for=condition=Ready", "--timeout=240s", limit=300)
    found: Samples = defaultdict(dict)
    begin = time.time()
    make_rounds(kube)
    for number in range(SECONDS // EVERY + 1):
        time.sleep(max(0.0, begin + number * EVERY - time.time()))
        _scrape(kube, begin, number, found)
    yield found
    remove(kube)


@pytest.fixture(scope="module")
def folder(samples: Samples, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the chart's rules, and with what was scraped."""
    ensure()
    made = tmp_path_factory.mktemp("alerts")
    write_rules(made)
    numbers = range(SECONDS // EVERY + 1)
    listed = [
        {"series": name, "values": " ".join(str(found.get(number, "_")) for number in numbers)}
        for name, found in samples.items()
    ]
    (made / "series.yaml").write_text(yaml.safe_dump(listed))
    return made


@pytest.mark.parametrize("fault", ALERTS)
def test_the_alert_fires_within_three_minutes(fault: str, folder: Path) -> None:
    alert, reason = ALERTS[fault]
    about = f', reason="{reason}"' if reason else ""
    # By then the round of a hung pod has failed, and another alert tells of that.
    fired = f'max_over_time(ALERTS{{alertname="{alert}", alertstate="firing"{about}}}[{SECONDS}s])'
    firing = f"clamp_max(count({fired}), 1)"
    check = {"expr": firing, "eval_time": f"{SECONDS}s", "exp_samples": [{"labels": "{}", "value": 1}]}
    series = yaml.safe_load((folder / "series.yaml").read_text())
    case = {"interval": f"{EVERY}s", "input_series": series, "promql_expr_test": [check]}
    judge(folder, "test", [case])
