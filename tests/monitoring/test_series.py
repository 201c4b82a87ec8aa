# SPDX-License-Identifier: Apache-2.0
"""Each series, label and value in an alert or a panel is in a scrape of the operator, the gateway or a pod."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from hack.generate.dashboards import DASHBOARDS
from hack.generate.runbooks import rules
from poc_gateway.metrics import CERTIFICATE_EXPIRATION, HTTP_REQUESTS, HTTP_SECONDS
from poc_gateway.server.gauges import DatabaseGauges, JobGauges
from poc_gateway.store.database import Database
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.clients.errors import PodTimeout, StoreForbidden, StoreUnavailable
from poc_operator.controller.metrics import Metrics
from poc_operator.observed import PodReport
from poc_operator.planning.snapshot import Loss, WorkEvent
from tests.docs.pages import ROOT
from tests.unit.poc_operator.build import a_pod, a_round, a_slot, a_status, look
from vllm_poc.server import metrics as pod_metrics

#: Series, then labels, then the values that were seen.
Scrape = Mapping[str, Mapping[str, set[str]]]

#: Labels that Prometheus adds, and those whose values have no list.
TARGET = {"namespace", "pod"}
OPEN = {"route", "status", "port", "kind", "cause", "pod", "namespace", "le"}
_SELECTOR = re.compile(r"\b((?:poc|DCGM|vllm)_\w+)(?:\{([^}]*(?:\{path\}[^}]*)?)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
_LABELS = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)|\{\{ ?(?:\$labels\.)?(\w+) ?\}\}")
#: Series of the exporter of DCGM, which no process of ours has.
DCGM = {
    *("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_TEMP"),
    *("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_XID_ERRORS"),
}


def _operator() -> str:
    """What an operator tells that has met each kind of failure once."""
    metrics = Metrics()
    status = a_status(a_slot())
    seen = look(a_round(status), (a_pod("a"), PodReport(error="no answer", silent_seconds=40)))
    metrics.planned(seen, status, [WorkEvent(reason=Reason.WORK_LOST, message="lost", loss=Loss.POD_GONE)])
    metrics.poll_failed(PodTimeout("no answer"))
    metrics.work_failed(KeyError("a"))
    metrics.api_server_failed(StoreForbidden("no"))
    metrics.api_server_failed(StoreUnavailable("no"))
    return metrics.text().decode()


def _gateway(folder: Path) -> str:
    """What a gateway with a SQLite file tells after one request."""
    database = Database.open(f"sqlite:///{folder}/gateway.db")
    HTTP_REQUESTS.labels("network", "GET", "/health", "200").inc()
    HTTP_SECONDS.labels("network", "/health", "2xx").observe(0.1)
    CERTIFICATE_EXPIRATION.labels("network").set(1)
    registry = CollectorRegistry()
    registry.register(DatabaseGauges(database))
    registry.register(JobGauges([]))
    text = prometheus_client.generate_latest(registry) + prometheus_client.generate_latest(prometheus_client.REGISTRY)
    database.close()
    return text.decode()


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    # The pod's instruments stand on the same registry as the gateway's.
    pod_metrics.begin("tiny")
    pod_metrics.set_ready("Ready")
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for text in (_operator(), _gateway(tmp_path_factory.mktemp("gateway"))):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                for label, value in ({"": ""} | sample.labels).items():
                    found[sample.name][label].add(value)
    return found


def _queries() -> Iterator[tuple[str, str, str]]:
    for rule in rules():
        yield rule["alert"], str(rule["expr"]), " ".join(rule["annotations"].values())
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            yield f"{dashboard.name}: {panel.title}", panel.query, panel.legend


@pytest.mark.parametrize(
    ("where", "query", "text"), list(_queries()), ids=lambda value: value if len(value) < 60 else ""
)
def test_series_and_labels_exist(where: str, query: str, text: str, scrape: Scrape) -> None:
    selectors = _SELECTOR.findall(query)
    assert selectors, where
    ours = [(name, matchers) for name, matchers in selectors if name not in DCGM]
    for name, matchers in ours:
        assert name in scrape
        for label, sign, value in _MATCHER.findall(matchers):
            assert label in scrape[name].keys() | TARGET
            if label not in OPEN and sign in ("=", "=~"):
                assert set(value.split("|")) <= scrape[name][label]
    named = {
        label.strip()
        for joined, alone in _LABELS.findall(f"{query} {text}")
        for label in (joined or alone).split(",")
        if label.strip() not in ("", "$value")
    }
    labels = TARGET.union(*(scrape[name].keys() for name, _ in ours))
    assert named <= labels


def test_a_series_that_is_not_there_is_found(scrape: Scrape) -> None:
    with pytest.raises(AssertionError):
        test_series_and_labels_exist("x", 'poc_operator_slots{state="Resting"}', "", scrape)
    with pytest.raises(AssertionError):
        test_series_and_labels_exist("x", "sum by (colour) (poc_operator_slots)", "", scrape)


FILES = sorted((ROOT / "charts/vllm-poc-operator/files/dashboards").glob("*.json"))


def test_dashboards_have_uids_of_their_own() -> None:
    uids = [json.loads(file.read_text())["uid"] for file in FILES]
    assert len(FILES) == len(set(uids)) == len(DASHBOARDS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_dashboard_works_anywhere(file: Path) -> None:
    body = json.loads(file.read_text())
    variables = {variable["name"]: variable for variable in body["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert "namespace" in variables
    assert len({panel["id"] for panel in body["panels"]}) == len(body["panels"])
    for panel in body["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert set(re.findall(r'namespace=~?"([^"]*)"', target["expr"])) <= {"$namespace"}
