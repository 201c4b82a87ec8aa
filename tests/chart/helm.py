# SPDX-License-Identifier: Apache-2.0
"""helm on this checkout's chart."""

import json
from pathlib import Path
from typing import Any

import yaml

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import NAMESPACE, OPERATOR, SYSTEM_NAMESPACE
from hack.toolchain.common import run

Values = dict[str, Any]
LIMIT = 30.0
#: Not the demo's release, so that the API server judges new objects and not changes of present ones.
RELEASE = "fresh"

_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
_COMMON: Values = {
    "image": {"repository": "registry.example.org/poc", "digest": f"sha256:{'0' * 64}", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "podAnnotations": {"example.org/note": "text"},
    "podLabels": {"example.org/team": "a"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [_TOLERATION],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "high",
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example.org"}],
    "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
}
#: Every value of each chart set to something else than its default.
ALL_VALUES: dict[Path, Values] = {
    OPERATOR_CHART: {
        **_COMMON,
        "global": {"imageRegistry": "mirror.example.org"},
        "nameOverride": "unused",
        "fullnameOverride": f"{RELEASE}-{OPERATOR}",  # as it is without, so that tests find the objects
        "commonLabels": {"example.org/cost-center": "poc"},
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-extra"}}],
        "networkPolicy": {"enabled": False},
        "crds": {"enabled": False},
        "watchNamespaces": [NAMESPACE, "default"],
        "rbac": {"aggregate": False, "readSecrets": True},
        "serviceAccount": {"create": True, "name": "own", "annotations": {"example.org/role": "poc"}},
        "leaderElection": {"namespace": "kube-public"},
        "auth": {"existingSecret": "pod-token"},
        "fleets": {"enabled": True, "image": {"repository": "registry.example.org/worker", "tag": "2"}},
        "gateway": {
            "enabled": True,
            "image": {"repository": "registry.example.org/gateway", "digest": f"sha256:{'1' * 64}"},
            "auth": {"existingSecret": "gateway-tokens"},
            "database": {"existingSecret": "gateway-database"},
            "ingest": {"replicas": 3},
            "storage": {"size": "1Ti", "className": "fast", "existingClaim": "results"},
            "mlNodes": [
                {
                    "name": "h200",
                    "number": 1,
                    "host": "h200.example.org",
                    "auth": {"existingSecret": "h200-token"},
                    "chat": {"existingSecret": "h200-api-key"},
                    "template": {"namespace": NAMESPACE, "spec": {"selector": {"matchLabels": {"app": "vllm"}}}},
                },
                {
                    "name": "b200",
                    "template": {"namespace": "default", "spec": {"fleetRef": {"name": "b200"}}},
                },
            ],
            "statTests": {"*MiniMax*": {"dist_threshold": 0.7}},
            "pValueThreshold": "apply",
            "accessLog": "all",
            "receivers": {"allow": ["*.example.org", "example.com"], "private": ["10.0.0.0/8", "fd00::/8"]},
            "limits": {"resultsPerRound": 30_000_000, "volumePercentPerRound": 40},
            "retention": {"days": 7, "bytes": 5_000_000_000},
            "archive": {
                "bucket": "poc-results",
                "prefix": "cluster-1",
                "endpoint": "https://minio.example.org:9000",
                "region": "eu-central-1",
                "existingSecret": "archive-credentials",
                "afterSeconds": 600,
            },
            "networkService": {
                "type": "LoadBalancer",
                "port": 8443,
                "externalTrafficPolicy": "Local",
                "annotations": {"example.org/lb": "internal"},
            },
            "tls": {"existingSecret": "gateway-tls"},
            "httpRoute": {
                "enabled": False,  # the API server does not know the kind
                "parentRefs": [{"name": "public"}],
                "hostnames": ["poc.example.org"],
                "annotations": {"example.org/note": "text"},
                "chatPastGateway": True,
            },
            "ingress": {
                "enabled": True,
                "className": "traefik",
                "annotations": {"example.org/note": "text"},
                "hosts": [{"host": "poc.example.org", "paths": [{"path": "/nodes", "pathType": "Prefix"}]}],
                "tls": [{"hosts": ["poc.example.org"], "secretName": "poc-tls"}],
            },
            "networkPolicy": {
                "enabled": True,
                "insideFrom": [{"podSelector": {}}],
                "networkFrom": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
                "ingressFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "traefik"}}}],
            },
            "resources": {"limits": {"memory": "2Gi"}},
            "extraEnv": [{"name": "POC_GATEWAY_PAYLOAD_ARTIFACTS", "value": "500"}],
        },
        "logFormat": "plain",
        "uninstall": {"suspendWork": True, "waitSeconds": 30},
        "maxNoncesPerSecond": 12_345,
        "podLeaseSeconds": 600,
        "metrics": {
            "service": True,
            "serviceMonitor": False,  # the API server does not know the kind
            "serviceMonitorLabels": {"release": "prometheus"},
            "intervalSeconds": 10,
        },
    },
}


def lint(kube: Kube, chart: Path, values: Values) -> str:
    """Run ``helm lint --strict``; UserError with its output if it finds something."""
    return run([kube.helm_path, "lint", "--strict", chart, "--values", "-"], limit=LIMIT, stdin=json.dumps(values))


def render(kube: Kube, chart: Path, values: Values) -> str:
    """Return what ``helm template`` prints; UserError with helm's message if the values are refused."""
    argv: list[str | Path] = [kube.helm_path, "template", RELEASE, chart, "--namespace", SYSTEM_NAMESPACE]
    return run([*argv, "--values", "-"], limit=LIMIT, stdin=json.dumps(values))


def objects(kube: Kube, chart: Path, values: Values) -> list[dict[str, Any]]:
    """Return the rendered objects."""
    return [body for body in yaml.safe_load_all(render(kube, chart, values)) if body]


def deployment(kube: Kube, chart: Path, values: Values) -> Any:  # noqa: ANN401 - a Kubernetes object
    """Return the operator's rendered Deployment."""
    return deployments(kube, chart, values)[0]


def gateway(kube: Kube, values: Values) -> Any:  # noqa: ANN401 - a Kubernetes object
    """Return the gateway's rendered Deployment."""
    return deployments(kube, OPERATOR_CHART, values)[1]


def deployments(kube: Kube, chart: Path, values: Values) -> list[Any]:
    """Return the rendered Deployments, the gateway's last."""
    found = [body for body in objects(kube, chart, values) if body["kind"] == "Deployment"]
    return sorted(found, key=lambda body: body["metadata"]["name"].endswith("-gateway"))
