# SPDX-License-Identifier: Apache-2.0
"""The gateway in the operator's chart: its settings, its rights, its pod."""

from typing import Any

import pytest
import yaml

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import GATEWAY, NAMESPACE, SYSTEM_NAMESPACE
from hack.toolchain.common import UserError
from poc_gateway.settings import Settings
from tests.chart.helm import ALL_VALUES, Values, gateway, objects, render
from tests.chart.test_security import create, may, pod_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

ROUNDS, FLEETS = "poc.gonka.ai/pocrounds", "poc.gonka.ai/pocfleets"
#: Rights that the gateway has, with a template for the network's rounds, and some of those that it has not.
MAY = [(FLEETS, "list"), (ROUNDS, "get"), (ROUNDS, "list"), (ROUNDS, "create"), (ROUNDS, "patch"), ("/pods", "list")]
MAY_NOT = [
    (ROUNDS, "delete"),
    (FLEETS, "patch"),
    (f"{ROUNDS}/status", "patch"),
    ("/pods", "delete"),
    ("/secrets", "get"),
    ("/configmaps", "get"),
]


def test_values_reach_the_gateway(kube: Kube) -> None:
    pod = gateway(kube, ALL_VALUES[OPERATOR_CHART])["spec"]["template"]["spec"]
    environment = {variable["name"]: variable for variable in pod["containers"][0]["env"]}
    assert {name: variable["value"] for name, variable in environment.items() if "value" in variable} == {
        "POC_GATEWAY_ML_NODES": "/etc/poc-gateway/ml-nodes.json",
        "POC_GATEWAY_WATCH_NAMESPACES": f"{NAMESPACE},default",
        "POC_GATEWAY_TLS_CERT": "/etc/poc-gateway-tls/tls.crt",
        "POC_GATEWAY_TLS_KEY": "/etc/poc-gateway-tls/tls.key",
        "POC_GATEWAY_STAT_TESTS": '{"*MiniMax*":{"dist_threshold":0.7}}',
        "POC_GATEWAY_P_VALUE_THRESHOLD": "apply",
        "POC_GATEWAY_LOG_FORMAT": "plain",
        "POC_GATEWAY_ACCESS_LOG": "all",
        "POC_GATEWAY_RECEIVER_ALLOW": "*.example.org,example.com",
        "POC_GATEWAY_RECEIVER_PRIVATE": "10.0.0.0/8,fd00::/8",
        "POC_GATEWAY_ROUND_RESULTS": "30000000",
        "POC_GATEWAY_ROUND_VOLUME_PERCENT": "40",
        "POC_GATEWAY_RETENTION_SECONDS": str(7 * 86_400),
        "POC_GATEWAY_RETENTION_BYTES": "5000000000",
        "POC_GATEWAY_ARCHIVE_BUCKET": "poc-results",
        "POC_GATEWAY_ARCHIVE_PREFIX": "cluster-1",
        "POC_GATEWAY_ARCHIVE_ENDPOINT": "https://minio.example.org:9000",
        "POC_GATEWAY_ARCHIVE_REGION": "eu-central-1",
        "POC_GATEWAY_ARCHIVE_AFTER_SECONDS": "600",
        "POC_GATEWAY_PAYLOAD_ARTIFACTS": "500",
    }
    secrets = {
        name: variable["valueFrom"]["secretKeyRef"] for name, variable in environment.items() if "valueFrom" in variable
    }
    assert secrets == {
        "POC_GATEWAY_TOKEN": {"name": "gateway-tokens", "key": "token"},
        "POC_GATEWAY_OPERATOR_TOKEN": {"name": "gateway-tokens", "key": "operator-token"},
        "POC_GATEWAY_CALLBACK_KEY": {"name": "gateway-tokens", "key": "callback-key"},
        "POC_GATEWAY_NETWORK_TOKEN": {"name": "gateway-tokens", "key": "network-token"},
        "POC_GATEWAY_POD_TOKEN": {"name": "pod-token", "key": "token"},
        "POC_GATEWAY_DATABASE": {"name": "gateway-database", "key": "url"},
        "POC_GATEWAY_ARCHIVE_ACCESS_KEY": {"name": "archive-credentials", "key": "access-key"},
        "POC_GATEWAY_ARCHIVE_SECRET_KEY": {"name": "archive-credentials", "key": "secret-key"},
    }


def test_every_variable_of_the_gateway_is_a_setting(kube: Kube) -> None:
    names = {str(field.alias) for field in Settings.model_fields.values()}
    pod = gateway(kube, ALL_VALUES[OPERATOR_CHART])["spec"]["template"]["spec"]
    assert {variable["name"] for variable in pod["containers"][0]["env"]} <= names


def test_without_the_gateway_nothing_of_it_is_left(kube: Kube) -> None:
    # The CRDs mention the gateway in their descriptions.
    rendered = render(kube, OPERATOR_CHART, {"gateway": {"enabled": False}, "crds": {"enabled": False}})
    assert "POC_GATEWAY" not in rendered
    assert "--gateway-url=" not in rendered
    assert not any(body["metadata"]["name"].endswith("-gateway") for body in yaml.safe_load_all(rendered) if body)


@pytest.mark.parametrize(("right", "allowed"), [(right, True) for right in MAY] + [(right, False) for right in MAY_NOT])
def test_the_gateway_may_do_what_it_needs_and_nothing_else(kube: Kube, right: tuple[str, str], allowed: bool) -> None:
    assert may(kube, *right, account=GATEWAY) is allowed


def rules(kube: Kube, values: Values) -> list[Any]:
    return [
        body["rules"]
        for body in objects(kube, OPERATOR_CHART, values)
        if body["kind"] == "ClusterRole" and body["metadata"]["name"].endswith(f"-gateway:{SYSTEM_NAMESPACE}")
    ]


def test_without_a_template_the_gateway_only_reads_rounds(kube: Kube) -> None:
    group = ["poc.gonka.ai"]
    assert rules(kube, {}) == [
        [
            {"apiGroups": group, "resources": ["pocrounds"], "verbs": ["get", "list"]},
            {"apiGroups": group, "resources": ["pocfleets"], "verbs": ["list"]},
        ]
    ]


def test_a_token_is_made_once(kube: Kube) -> None:
    secret = kube.get("--namespace", SYSTEM_NAMESPACE, "secret", f"{GATEWAY}-tokens")["data"]
    assert set(secret) == {"token", "operator-token", "callback-key", "network-token"}
    assert len(set(secret.values())) == len(secret)
    given = objects(kube, OPERATOR_CHART, {"gateway": {"auth": {"existingSecret": "mine"}}})
    assert not any(body["kind"] == "Secret" for body in given)


def test_the_gateways_pod_passes_the_restricted_level(kube: Kube) -> None:
    create(kube, pod_of(kube, GATEWAY))


def test_several_gateways_have_postgresql_and_are_spread(kube: Kube) -> None:
    values = {"gateway": {"ingest": {"replicas": 3}, "database": {"existingSecret": "database"}}}
    spec = gateway(kube, values)["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (3, "RollingUpdate")
    labels = spec["selector"]["matchLabels"]
    spread = spec["template"]["spec"]["topologySpreadConstraints"]
    assert {one["whenUnsatisfiable"] for one in spread} == {"ScheduleAnyway"}
    assert all(one["labelSelector"]["matchLabels"] == labels for one in spread)
    (budget,) = [one for one in objects(kube, OPERATOR_CHART, values) if one["kind"] == "PodDisruptionBudget"]
    assert budget["spec"] == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": labels},
    }


@pytest.mark.parametrize(
    ("database", "strategy"), [({}, "Recreate"), ({"existingSecret": "database"}, "RollingUpdate")], ids=str
)
def test_one_gateway_needs_no_budget(kube: Kube, database: Values, strategy: str) -> None:
    values = {"gateway": {"database": database}}
    spec = gateway(kube, values)["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, strategy)
    assert "topologySpreadConstraints" not in spec["template"]["spec"]
    assert not [one for one in objects(kube, OPERATOR_CHART, values) if one["kind"] == "PodDisruptionBudget"]


def test_values_of_an_installation_that_is_older_are_enough(kube: Kube) -> None:
    # As `helm upgrade --reuse-values` has them.
    tokens = {"auth": {"existingSecret": "tokens"}}  # those of the chart would differ in each rendering
    present = gateway(kube, {"gateway": tokens})
    older = gateway(kube, {"gateway": {**tokens, "ingest": None, "limits": None, "archive": None}})
    names = {"POC_GATEWAY_ROUND_RESULTS": "round_results", "POC_GATEWAY_ROUND_VOLUME_PERCENT": "round_volume_percent"}
    container = present["spec"]["template"]["spec"]["containers"][0]
    left_out = {one["name"]: one["value"] for one in container["env"] if one["name"] in names}
    defaults = Settings.from_environment({})
    assert left_out == {name: str(getattr(defaults, field)) for name, field in names.items()}
    container["env"] = [one for one in container["env"] if one["name"] not in names]
    assert older == present


def test_sqlite_has_one_gateway(kube: Kube) -> None:
    with pytest.raises(UserError, match="replicas is 2, and SQLite has one gateway"):
        render(kube, OPERATOR_CHART, {"gateway": {"ingest": {"replicas": 2}}})


def test_the_traffic_policy_of_a_service_inside_the_cluster_is_refused(kube: Kube) -> None:
    with pytest.raises(UserError, match="set type to NodePort or LoadBalancer"):
        render(kube, OPERATOR_CHART, {"gateway": {"networkService": {"externalTrafficPolicy": "Local"}}})
