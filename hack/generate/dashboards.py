# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboards, from tables of their panels.

Each has variables for the data source and the namespace, and a uid that stays. Panels are 8 of 24 columns wide.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "Written by `make generate` from hack/generate/dashboards.py: do not edit."
_ROW_HEIGHT, _WIDTH, _COLUMNS = 8, 8, 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One panel: a query, the legend of its series, a unit of Grafana's, and for a number of now ``stat``."""

    title: str
    query: str
    legend: str = ""
    unit: str = "short"
    kind: str = "timeseries"


@dataclass(frozen=True)
class Dashboard:
    """A dashboard; ``namespaces`` is the series whose namespaces its variable offers."""

    name: str
    title: str
    namespaces: str
    panels: Sequence[Panel]


_OF_PODS = '{namespace=~"$namespace"}'

ROUNDS = Dashboard(
    "rounds",
    "vLLM PoC / Rounds",
    "poc_operator_leader",
    (
        Panel("Operators that act", f"sum(poc_operator_leader{_OF_PODS})", kind="stat"),
        Panel("Rounds under way", 'sum(poc_operator_rounds{namespace=~"$namespace", state="Running"})', kind="stat"),
        Panel("Oldest report", f"max(poc_operator_oldest_report_seconds{_OF_PODS})", unit="s", kind="stat"),
        Panel("Rounds by state", f"sum by (state) (poc_operator_rounds{_OF_PODS})", "{{state}}"),
        Panel("Slots by state", f"sum by (state) (poc_operator_slots{_OF_PODS})", "{{state}}"),
        Panel(
            "Validations and calibrations",
            f"sum by (state) (poc_operator_validations{_OF_PODS})"
            f" + sum by (state) (poc_operator_calibrations{_OF_PODS})",
            "{{state}}",
        ),
        Panel("Nonces computed per second", f"sum(rate(poc_operator_nonces_checked_total{_OF_PODS}[2m]))", "computed"),
        Panel("Valid nonces per second", f"sum(rate(poc_operator_nonces_valid_total{_OF_PODS}[2m]))", "valid"),
        Panel("Nonces settled per second", f"sum(rate(poc_operator_nonces_delivered_total{_OF_PODS}[2m]))", "settled"),
        Panel("Degraded objects", f"sum by (reason) (poc_operator_degraded{_OF_PODS}) > 0", "{{reason}}"),
        Panel("Slots lost", f"sum by (cause) (increase(poc_operator_retries_total{_OF_PODS}[5m]))", "{{cause}}"),
        Panel("Pods that deviate", f"sum(poc_operator_pods_deviating{_OF_PODS})", "pods"),
        Panel(
            "Polls that failed", f"sum by (kind) (increase(poc_operator_poll_errors_total{_OF_PODS}[5m]))", "{{kind}}"
        ),
        Panel(
            "Failures of the operator and of the API server",
            f"sum by (kind) (increase(poc_operator_internal_errors_total{_OF_PODS}[5m]))"
            f" or sum by (kind) (increase(poc_operator_api_server_errors_total{_OF_PODS}[5m]))",
            "{{kind}}",
        ),
        Panel(
            "Lag of the event loop, 99th percentile",
            f"histogram_quantile(0.99, sum by (le) (rate(poc_operator_loop_lag_seconds_bucket{_OF_PODS}[5m])))",
            "lag",
            "s",
        ),
    ),
)

FLEET = Dashboard(
    "fleet",
    "vLLM PoC / Fleets and pods",
    "poc_ready",
    (
        Panel("Pods on which PoC runs", 'sum(poc_ready{namespace=~"$namespace", reason="Ready"})', kind="stat"),
        Panel("Pods on which it does not", 'sum(poc_ready{namespace=~"$namespace", reason!="Ready"})', kind="stat"),
        Panel("Results that wait in pods", f"sum(poc_results_pending{_OF_PODS})", kind="stat"),
        Panel("Pods by readiness", f"sum by (reason) (poc_ready{_OF_PODS})", "{{reason}}"),
        Panel("Pods by activity", f"sum by (activity) (poc_activity{_OF_PODS})", "{{activity}}"),
        Panel("Pods by state", f"sum by (state) (poc_state{_OF_PODS})", "{{state}}"),
        Panel(
            "Nonces per second and pod",
            'sum by (pod) (rate(poc_nonces_computed_total{namespace=~"$namespace", work="round"}[2m]))',
            "{{pod}}",
        ),
        Panel(
            "Share of time that chat holds PoC back",
            f"sum by (pod) (rate(poc_held_back_seconds_total{_OF_PODS}[2m]))",
            "{{pod}}",
            "percentunit",
        ),
        Panel(
            "Time since the last progress of pods that compute",
            f"time() - poc_last_progress_timestamp_seconds{_OF_PODS} and on (namespace, pod) "
            f'poc_activity{{namespace=~"$namespace", activity="Computing"}} == 1',
            "{{pod}}",
            "s",
        ),
        Panel(
            "Slices, 99th percentile",
            f"histogram_quantile(0.99, sum by (le, pod) (rate(poc_slice_seconds_bucket{_OF_PODS}[5m])))",
            "{{pod}}",
            "s",
        ),
        Panel("Deliveries", f"sum by (outcome) (rate(poc_callbacks_total{_OF_PODS}[2m]))", "{{outcome}}"),
        Panel(
            "Nonces that were not finite",
            f"sum by (pod) (increase(poc_nonces_not_finite_total{_OF_PODS}[5m])) > 0",
            "{{pod}}",
        ),
        Panel("Requests for named nonces", f"sum by (pod) (poc_queued_jobs{_OF_PODS})", "{{pod}}"),
        Panel("Degraded fleets", "sum by (reason) (poc_operator_fleets_degraded) > 0", "{{reason}}"),
    ),
)

GATEWAY = Dashboard(
    "gateway",
    "vLLM PoC / Gateway",
    "poc_gateway_owner",
    (
        Panel("Gateways that forward", f"sum(poc_gateway_owner{_OF_PODS})", kind="stat"),
        Panel("Artifacts to forward", f"sum(poc_gateway_backlog_artifacts{_OF_PODS})", kind="stat"),
        Panel(
            "Oldest result not accepted",
            f"max(poc_gateway_oldest_undelivered_seconds{_OF_PODS})",
            unit="s",
            kind="stat",
        ),
        Panel("Artifacts received per second", f"sum(rate(poc_gateway_received_total{_OF_PODS}[2m]))", "received"),
        Panel("Artifacts stored per second", f"sum(rate(poc_gateway_stored_total{_OF_PODS}[2m]))", "stored"),
        Panel(
            "Results forwarded per second",
            f"sum by (content) (rate(poc_gateway_forwarded_total{_OF_PODS}[2m]))",
            "{{content}}",
        ),
        Panel(
            "Posts that were not accepted",
            f"sum by (kind) (rate(poc_gateway_forward_failures_total{_OF_PODS}[2m]))",
            "{{kind}}",
        ),
        Panel("Receivers in trouble", f"sum(poc_gateway_open_circuits{_OF_PODS})", "receivers"),
        Panel(
            "Results that are dead or expired",
            f"sum by (content) (increase(poc_gateway_dead_total{_OF_PODS}[5m]))"
            f" + sum by (content) (increase(poc_gateway_expired_total{_OF_PODS}[5m]))",
            "{{content}}",
        ),
        Panel(
            "Volume in use",
            f"1 - poc_gateway_volume_free_bytes{_OF_PODS} / poc_gateway_volume_bytes{_OF_PODS}",
            "{{pod}}",
            "percentunit",
        ),
        Panel("Database", f"sum(poc_gateway_database_bytes{_OF_PODS})", "size", "bytes"),
        Panel(
            "Commits, 99th percentile",
            f"histogram_quantile(0.99, sum by (le) (rate(poc_gateway_commit_seconds_bucket{_OF_PODS}[5m])))",
            "commit",
            "s",
        ),
        Panel(
            "Requests by status",
            f"sum by (port, status) (rate(poc_gateway_http_requests_total{_OF_PODS}[2m]))",
            "{{port}} {{status}}",
        ),
        Panel("Refusals", f"sum by (reason) (rate(poc_gateway_http_refusals_total{_OF_PODS}[2m]))", "{{reason}}"),
        Panel(
            "Answers to the network node, 99th percentile",
            "histogram_quantile(0.99, sum by (le, route) (rate("
            'poc_gateway_http_request_seconds_bucket{namespace=~"$namespace", port="network", status="2xx"}[5m])))',
            "{{route}}",
            "s",
        ),
        Panel("Requests for named nonces", f"sum by (kind, state) (poc_gateway_jobs{_OF_PODS})", "{{kind}} {{state}}"),
        Panel("Rounds that wait for the archive", f"sum(poc_gateway_archive_waiting_rounds{_OF_PODS})", "rounds"),
    ),
)

GPU = Dashboard(
    "gpu",
    "vLLM PoC / GPUs",
    "poc_ready",
    (
        Panel(
            "Nonces per second and pod",
            'sum by (pod) (rate(poc_nonces_computed_total{namespace=~"$namespace", work="round"}[2m]))',
            "{{pod}}",
        ),
        Panel(
            "Share of time that chat holds PoC back",
            f"sum by (pod) (rate(poc_held_back_seconds_total{_OF_PODS}[2m]))",
            "{{pod}}",
            "percentunit",
        ),
        Panel("GPU utilization (DCGM)", f"avg by (pod) (DCGM_FI_DEV_GPU_UTIL{_OF_PODS})", "{{pod}}", "percent"),
        Panel("Power (DCGM)", f"sum by (pod) (DCGM_FI_DEV_POWER_USAGE{_OF_PODS})", "{{pod}}", "watt"),
        Panel("SM clock (DCGM)", f"avg by (pod) (DCGM_FI_DEV_SM_CLOCK{_OF_PODS}) * 1e6", "{{pod}}", "hertz"),
        Panel("Temperature (DCGM)", f"max by (pod) (DCGM_FI_DEV_GPU_TEMP{_OF_PODS})", "{{pod}}", "celsius"),
        Panel("Memory in use (DCGM)", f"sum by (pod) (DCGM_FI_DEV_FB_USED{_OF_PODS})", "{{pod}}", "decmbytes"),
        Panel("XID errors (DCGM)", f"max by (pod) (DCGM_FI_DEV_XID_ERRORS{_OF_PODS}) > 0", "{{pod}}"),
    ),
)

DASHBOARDS = (ROUNDS, FLEET, GATEWAY, GPU)


def render(dashboard: Dashboard) -> str:
    """Return the dashboard as JSON, as Grafana imports it."""
    body = {
        "description": MARK,
        "uid": f"vllm-poc-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["vllm-poc"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables(dashboard.namespaces)},
        "panels": list(_panels(dashboard.panels)),
    }
    return json.dumps(body, indent=1) + "\n"


def _variables(series: str) -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    namespace = {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f"label_values({series}, namespace)", "refId": "namespaces"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return [source, namespace]


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    for number, panel in enumerate(panels):
        place = divmod(number * _WIDTH, _COLUMNS)
        target = {"refId": "A", "datasource": _SOURCE, "expr": panel.query, "legendFormat": panel.legend or "__auto"}
        yield {
            "id": number + 1,
            "type": panel.kind,
            "title": panel.title,
            "datasource": _SOURCE,
            "gridPos": {"x": place[1], "y": place[0] * _ROW_HEIGHT, "w": _WIDTH, "h": _ROW_HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
            "targets": [target],
        }
