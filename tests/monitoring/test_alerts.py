# SPDX-License-Identifier: Apache-2.0
"""The alerts as the chart renders them: valid, each fires for its fault and is silent for what is normal."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.generate.runbooks import rules
from hack.toolchain.common import UserError
from tests.docs.pages import ROOT
from tests.monitoring.cases import CASES, Quiet, Series
from tests.monitoring.rendered import RUNBOOKS, VALUES, ensure, judge, one, promtool, render, write_rules

pytestmark = pytest.mark.timeout(300, func_only=True)

Rules = list[dict[str, Any]]
#: On which page the reasons of an alert are.
_REASONS = {
    **dict.fromkeys(("PoCRoundsIdle", "PoCRoundFailed", "PoCWorkDegraded", "PoCWorkImpaired"), "work"),
    "PoCFleetDegraded": "fleets",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rules as rules.yaml."""
    ensure()
    found = tmp_path_factory.mktemp("alerts")
    write_rules(found)
    return found


def _groups(folder: Path) -> Rules:
    groups: Rules = yaml.safe_load((folder / "rules.yaml").read_text())["groups"]
    return groups


def _count(alert: str, minutes: int, *, firing: bool) -> dict[str, Any]:
    samples = [{"labels": "{}", "value": 1}] if firing else []
    expression = f'clamp_max(count(ALERTS{{alertname=~"{alert}", alertstate="firing"}}), 1)'
    return {"expr": expression, "eval_time": f"{minutes}m", "exp_samples": samples}


def _test(series: Series, *checks: dict[str, Any]) -> dict[str, Any]:
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "30s", "input_series": inputs, "promql_expr_test": list(checks)}


def test_the_rules_are_valid(folder: Path) -> None:
    assert f"SUCCESS: {len(CASES)} rules found" in promtool(folder, "check", "rules", "rules.yaml")


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == {rule["alert"] for rule in rules()}


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_for_its_fault_alone(alert: str, folder: Path) -> None:
    case = CASES[alert]
    tests = [
        _test(series, _count(alert, 5, firing=False), _count(alert, case.minutes, firing=True)) for series in case.fires
    ]
    tests += [_test(series, _count(alert, case.minutes, firing=False)) for series in case.silent]
    judge(folder, alert, tests)


def test_a_critical_alert_fires_within_three_minutes() -> None:
    critical = {rule["alert"] for rule in rules() if rule["labels"]["severity"] == "critical"}
    assert {alert for alert, case in CASES.items() if case.minutes > 8} & critical == set()


def test_chat_that_holds_poc_back_is_silent(folder: Path) -> None:
    quiet = Quiet()
    others = "|".join(alert for alert in CASES if alert not in quiet.but)
    judge(folder, "chat", [_test(quiet.series, *(_count(others, at, firing=False) for at in (5, 15, 30)))])


def test_an_alert_leads_to_its_runbook(folder: Path) -> None:
    page = (ROOT / "docs/operate/runbooks/alerts.md").read_text()
    for rule in (rule for group in _groups(folder) for rule in group["rules"]):
        page_of_reasons = _REASONS.get(rule["alert"])
        own = f"{RUNBOOKS}/#{rule['alert'].lower()}"
        reasons = f"{RUNBOOKS.removesuffix('alerts')}{page_of_reasons}/#{{{{ $labels.reason | toLower }}}}"
        assert rule["annotations"]["runbook_url"] == (reasons if page_of_reasons else own)
        assert bool(page_of_reasons) == ("(namespace, reason) (" in rule["expr"] and "poc_operator_" in rule["expr"])
        assert f"\n## {rule['alert']}\n" in page
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def _expect(folder: Path, alert: str, series: Series, labels: dict[str, str], annotations: dict[str, str]) -> None:
    """Hold that a critical alert fires with these texts."""
    expected = {
        "exp_labels": {"severity": "critical", "namespace": "poc-system", **labels},
        "exp_annotations": annotations,
    }
    test = _test(series)
    test["alert_rule_test"] = [{"alertname": alert, "eval_time": "5m", "exp_alerts": [expected]}]
    judge(folder, f"texts of {alert}", [test])


def test_an_alert_on_a_reason_leads_to_that_reason(folder: Path) -> None:
    _expect(
        folder,
        "PoCRoundsIdle",
        {'poc_operator_idle_rounds{namespace="poc-system", pod="a", reason="NoPodReady"}': "2x20"},
        {"reason": "NoPodReady"},
        {
            "summary": "No pod works on a round (NoPodReady).",
            "description": "No pod works on 2 rounds, which wait for no other round: NoPodReady.",
            "runbook_url": f"{RUNBOOKS.removesuffix('alerts')}work/#nopodready",
        },
    )


def test_own_runbooks_elsewhere_have_the_alerts_alone(folder: Path) -> None:
    assert folder.is_dir()  # helm is built
    chosen = VALUES["metrics"]["prometheusRule"] | {"runbookUrl": "https://wiki.example.org/poc"}
    rules = one(render({"metrics": VALUES["metrics"] | {"prometheusRule": chosen}}), "PrometheusRule")
    urls = [rule["annotations"]["runbook_url"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    assert all(url.startswith("https://wiki.example.org/poc/#poc") for url in urls)


def test_texts_are_filled_in(folder: Path) -> None:
    _expect(
        folder,
        "PoCGatewayDiskFull",
        {'poc_gateway_disk_full{namespace="poc-system", pod="a"}': "1x20"},
        {"pod": "a"},
        {
            "summary": "The disk of the gateway is full.",
            "description": "The gateway a stores nothing new. Pods keep their results until there is room.",
            "runbook_url": f"{RUNBOOKS}/#pocgatewaydiskfull",
        },
    )


def test_values_reach_the_rules(folder: Path) -> None:
    assert folder.is_dir()  # helm is built
    chosen = {"disabled": ["PoCOperatorAbsent"], "ruleLabels": {"team": "poc"}}
    values = VALUES | {
        "gateway": {"enabled": False},
        "metrics": VALUES["metrics"] | {"prometheusRule": VALUES["metrics"]["prometheusRule"] | chosen},
    }
    found = one(render(values), "PrometheusRule")
    assert found["metadata"]["labels"]["release"] == "prometheus"
    names = {rule["alert"] for group in found["spec"]["groups"] for rule in group["rules"]}
    assert "PoCReportsOld" in names
    assert not any("Gateway" in name or name == "PoCOperatorAbsent" for name in names)
    assert {rule["labels"]["team"] for group in found["spec"]["groups"] for rule in group["rules"]} == {"poc"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prometheusRule": {"enabled": True}}, "/metrics/prometheusRule/runbookUrl"),
        ({"prometheusRule": {"disabled": ["pocx"]}}, "/metrics/prometheusRule/disabled/0"),
        ({"podMonitor": {"port": 8000}}, "/metrics/podMonitor/port"),
        ({"dashboards": {"enable": True}}, "/metrics/dashboards"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], says: str, folder: Path) -> None:
    assert folder.is_dir()
    with pytest.raises(UserError) as refusal:
        render({"metrics": values})
    assert says in str(refusal.value)


def test_nothing_is_there_unless_asked_for(folder: Path) -> None:
    assert folder.is_dir()
    monitoring = {"PodMonitor", "PrometheusRule", "ServiceMonitor"}
    assert {body["kind"] for body in render({})} & monitoring == set()
    assert not any("dashboard" in body["metadata"]["name"] for body in render({}))


def test_pods_of_ones_own_are_scraped_once(folder: Path) -> None:
    assert folder.is_dir()
    spec = one(render(VALUES | {"watchNamespaces": ["poc"]}), "PodMonitor")["spec"]
    assert spec["namespaceSelector"] == {"matchNames": ["poc"]}
    assert spec["selector"]["matchLabels"] == {"poc.gonka.ai/worker": "true"}
    assert spec["selector"]["matchExpressions"] == [{"key": "poc.gonka.ai/fleet", "operator": "DoesNotExist"}]
    assert spec["podMetricsEndpoints"] == [{"port": "http", "path": "/metrics", "interval": "30s"}]
    assert one(render(VALUES), "PodMonitor")["spec"]["namespaceSelector"] == {"any": True}
