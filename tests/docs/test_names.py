# SPDX-License-Identifier: Apache-2.0
"""Settings, series and routes of the reference pages are those of the code: all of them, and no others."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

import vllm_poc.server.metrics
from poc_gateway.outbox.forward import Outbox
from poc_gateway.query.export import writer
from poc_gateway.query.messages import Format
from poc_gateway.server.gauges import DatabaseGauges, JobGauges
from poc_gateway.server.process import Components, inside_app, network_app
from poc_gateway.settings import Settings as GatewaySettings
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import Rounds, RoundTerms
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.controller.metrics import Metrics
from poc_operator.fleets.resolve import Preset, packaged
from tests.docs.pages import ROOT, TRANSCRIPT, blocks, pages
from tests.support.builders.deliveries import a_round
from vllm_poc.server.routes import create_app
from vllm_poc.settings import Settings as PodSettings
from vllm_poc.wire.messages import API_PREFIX

REFERENCE = ROOT / "docs" / "reference"
_CODE = re.compile(r"`([^`\n]+)`")


def _codes(text: str) -> list[str]:
    """The pieces of code of a text, each of them whole."""
    return _CODE.findall(text)


def _first_cells(page: str, section: str = "") -> list[str]:
    """The pieces of code in the first cells of the tables of a page, or of one of its sections."""
    text = (REFERENCE / page).read_text()
    if section:
        (text,) = [part for part in text.split("\n## ") if part.startswith(f"{section}\n")]
    rows = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    return [code for row in rows for code in _codes(row)]


def _variables(settings: type[BaseModel]) -> set[str]:
    return {str(field.validation_alias or field.alias) for field in settings.model_fields.values()}


def test_the_states_of_a_slot_are_listed_in_their_order() -> None:
    page = (ROOT / "docs" / "explain" / "lifecycle.md").read_text()
    (section,) = [part for part in page.split("\n## ") if part.startswith("The states of a slot\n")]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(SlotState)


def test_presets_are_listed_with_their_figures() -> None:
    page = (ROOT / "docs" / "operate" / "fleets.md").read_text()
    shown = dict(re.findall(r"^\| `([^`]+)` \| (\d+ .+) \|$", page, re.MULTILINE))
    found = {}
    for name, preset in packaged().items():
        assert isinstance(preset, Preset)
        figures = [str(gpu.nonces_per_minute or "–") for gpu in preset.gpus]  # noqa: RUF001
        found[name] = f"{', '.join(map(str, preset.gpus))} | {', '.join(figures)}"
    assert shown == found


def test_pod_settings_are_listed() -> None:
    assert set(_first_cells("pod-settings.md")) == _variables(PodSettings)


def test_gateway_settings_are_listed() -> None:
    listed = {f"POC_GATEWAY_{name}" for name in _first_cells("gateway-api.md") if name.isupper()}
    assert listed == _variables(GatewaySettings)


def test_every_variable_that_a_page_names_exists() -> None:
    known = _variables(PodSettings) | _variables(GatewaySettings)
    named = {
        (page.name, name)
        for page in pages()
        for name in re.findall(r"\b((?:VLLM_POC|POC_GATEWAY)_[A-Z_]*[A-Z])\b", page.read_text())
    }
    assert sorted(found for found in named if found[1] not in known) == []


def _series(registries: Iterable[str]) -> set[str]:
    """The names of our series in these expositions, as a query has to write them."""
    families = [family for text in registries for family in text_string_to_metric_families(text)]
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families
        if family.name.startswith("poc_") and not family.name.endswith("_created")
    }


@pytest.fixture
def gateway_series(tmp_path: Path) -> set[str]:
    database = Database.open(f"sqlite:///{tmp_path}/gateway.db")
    registry = CollectorRegistry()
    registry.register(DatabaseGauges(database))
    registry.register(JobGauges([]))
    texts = [prometheus_client.generate_latest(one).decode() for one in (registry, prometheus_client.REGISTRY)]
    database.close()
    return {name for name in _series(texts) if name.startswith("poc_gateway_")}


def _pod_series() -> set[str]:
    counters = _series([prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()])
    # A gauge appears when a server exists.
    values = [value for value in vars(vllm_poc.server.metrics).values() if isinstance(value, prometheus_client.Gauge)]
    return {name for name in counters if not name.startswith("poc_gateway_")} | {gauge._name for gauge in values}


def test_no_two_processes_share_a_series(gateway_series: set[str]) -> None:
    operator, pod = _series([Metrics().text().decode()]), _pod_series()
    assert all((operator, pod, gateway_series))
    assert not operator & pod
    assert not gateway_series & (operator | pod)


def test_metrics_of_operator_and_gateway_are_listed(gateway_series: set[str]) -> None:
    listed = {code for code in _first_cells("metrics.md") if code.startswith("poc_")}
    assert listed == _series([Metrics().text().decode()]) | gateway_series


def test_metrics_of_pods_are_listed() -> None:
    assert set(_first_cells("pod-api.md", "Metrics")) == _pod_series()


def test_queries_use_series_that_exist(gateway_series: set[str]) -> None:
    known = _series([Metrics().text().decode()]) | gateway_series | _pod_series()
    for page in pages():
        for query in re.findall(r"```promql\n(.*?)```", page.read_text(), re.DOTALL):
            # A histogram's name has an end in a query.
            named = re.findall(r"\bpoc_[a-z_]+?(?=(?:_bucket|_sum|_count)?\b)", query)
            assert set(named) <= known, page


def _routes(app: FastAPI) -> set[tuple[str, str]]:
    found: dict[str, Any] = app.openapi()["paths"]
    return {(method.upper(), _nameless(path)) for path, item in found.items() for method in item}


def _nameless(path: str) -> str:
    """Return a path whose parameters have no names: pages and code may call them differently."""
    return re.sub(r"\{\w+\}|\b[A-Z]{2,}\b", "{}", path)


def _listed_routes(page: str) -> set[tuple[str, str]]:
    found = [re.fullmatch(r"(GET|POST|DELETE) (/\S+)", code) for code in _first_cells(page)]
    return {(match[1], _nameless(match[2].rstrip("…").rstrip("/"))) for match in found if match}


def test_routes_of_the_gateway_are_listed(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path}/gateway.db")
    settings = GatewaySettings()

    async def read_round(_namespace: str, _name: str) -> None:
        return None

    rounds, outbox = Rounds(database, read_round), Outbox(database, settings)
    components = Components(settings=settings, database=database, rounds=rounds, outbox=outbox)
    inside, network = _routes(inside_app(components)), _routes(network_app(components))
    database.close()
    listed = _listed_routes("gateway-api.md")
    listed |= {(method, route.replace("/inference/pow/", "/pow/")) for method, route in listed}
    assert listed == inside | network


def test_tables_of_rounds_have_the_columns_of_the_kind() -> None:
    lines = [block.text.splitlines() for block in blocks() if block.language == TRANSCRIPT]
    tables = [found[i:] for found in lines for i, line in enumerate(found) if re.match("NAME .* DESIRED ", line)]
    assert tables
    columns = ["NAME", *(column.name.upper() for column in PoCRound.COLUMNS if not column.wide)]
    for header, *rows in tables:
        assert header.split() == columns
        # Whatever stands under a heading begins there.
        starts = [match.start() for match in re.finditer(r"\S+", header)]
        assert rows
        assert all(row[place - 1] == " " for row in rows for place in starts[1:])


def test_the_shown_export_has_the_columns_of_the_gateway() -> None:
    (shown,) = [block.text for block in blocks() if block.page.name == "quick-start.md" and block.language == "text"]
    exported = writer(Format.CSV, RoundTerms.of(a_round())).begin()
    assert exported.decode().splitlines() == shown.splitlines()


def test_routes_of_pods_are_listed() -> None:
    # No route asks for the service before a request comes.
    app = create_app(None)  # type: ignore[arg-type]
    listed = _listed_routes("pod-api.md") - {("GET", f"{API_PREFIX}/openapi.json")}
    assert listed == _routes(app)
