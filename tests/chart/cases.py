# SPDX-License-Identifier: Apache-2.0
"""Each value of the chart in a setting that is not its default, and in what surroundings it has an effect."""

from dataclasses import dataclass, field

from tests.chart.rendered import Values

#: CRDs take most of the time, and tokens of the chart differ in each rendering.
BASE: Values = {"crds": {"enabled": False}, "gateway": {"auth": {"existingSecret": "tokens"}}}

_ARCHIVE: Values = {"gateway": {"archive": {"bucket": "results"}}}
_NODE = {"name": "h200", "template": {"namespace": "poc", "spec": {"fleetRef": {"name": "h200"}}}}
_ROUTE: Values = {
    "gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}, "mlNodes": [_NODE]},
}
_INGRESS: Values = {"gateway": {"ingress": {"enabled": True, "hosts": [{"host": "poc.example.org"}]}}}
_MONITOR: Values = {"metrics": {"service": True, "serviceMonitor": True}}
_POD_MONITOR: Values = {"metrics": {"podMonitor": {"enabled": True}}}
_RULE: Values = {"metrics": {"prometheusRule": {"enabled": True, "runbookUrl": "https://docs.example.org/alerts"}}}
_DASHBOARDS: Values = {"metrics": {"dashboards": {"enabled": True}}}
_WATCHED: Values = {"watchNamespaces": ["poc"]}
_PEERS = [{"ipBlock": {"cidr": "192.0.2.0/24"}}]
_DIGEST = f"sha256:{'1' * 64}"
_NOTE = {"example.org/note": "text"}
_TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists"}]


@dataclass(frozen=True)
class Case:
    """A value, and what must be set beside it for it to have an effect."""

    value: object
    beside: Values = field(default_factory=dict)


CASES: dict[str, Case] = {
    "global.imageRegistry": Case("registry.example.org/mirror"),
    "nameOverride": Case("poc"),
    "fullnameOverride": Case("poc"),
    "commonLabels": Case({"example.org/team": "a"}),
    "image.repository": Case("registry.example.org/operator"),
    "image.tag": Case("2.0.0"),
    "image.digest": Case(_DIGEST),
    "image.pullPolicy": Case("Always"),
    "imagePullSecrets": Case([{"name": "pull"}]),
    "crds.enabled": Case(value=True),
    "watchNamespaces": Case(["poc"]),
    "rbac.aggregate": Case(value=False),
    "rbac.deletePods": Case(value=True, beside={"fleets": {"enabled": False}}),
    "rbac.readConfigMaps": Case(value=False),
    "rbac.readSecrets": Case(value=True),
    "uninstall.suspendWork": Case(value=False),
    "uninstall.waitSeconds": Case(30),
    "serviceAccount.create": Case(value=False, beside={"serviceAccount": {"name": "own"}}),
    "serviceAccount.name": Case("own"),
    "serviceAccount.annotations": Case(_NOTE),
    "leaderElection.namespace": Case("kube-public"),
    "auth.existingSecret": Case("pod-token"),
    "fleets.enabled": Case(value=False),
    "fleets.image.repository": Case("registry.example.org/worker"),
    "fleets.image.tag": Case("2.0.0"),
    "fleets.image.digest": Case(_DIGEST),
    "maxNoncesPerSecond": Case(12_345),
    "podLeaseSeconds": Case(600),
    "logFormat": Case("plain"),
    "gateway.enabled": Case(value=False),
    "gateway.image.repository": Case("registry.example.org/gateway"),
    "gateway.image.tag": Case("2.0.0"),
    "gateway.image.digest": Case(_DIGEST),
    "gateway.auth.existingSecret": Case("other-tokens"),
    "gateway.database.existingSecret": Case("database"),
    "gateway.ingest.replicas": Case(3, {"gateway": {"database": {"existingSecret": "database"}}}),
    "gateway.storage.size": Case("1Ti"),
    "gateway.storage.className": Case("fast"),
    "gateway.storage.existingClaim": Case("results"),
    "gateway.mlNodes": Case([_NODE]),
    "gateway.statTests": Case({"*MiniMax*": {"dist_threshold": 0.7}}),
    "gateway.pValueThreshold": Case("apply"),
    "gateway.receivers.allow": Case(["*.example.org"]),
    "gateway.receivers.private": Case(["10.0.0.0/8"]),
    "gateway.limits.resultsPerRound": Case(30_000_000),
    "gateway.limits.volumePercentPerRound": Case(40),
    "gateway.retention.days": Case(7),
    "gateway.retention.bytes": Case(5_000_000_000),
    "gateway.archive.bucket": Case("results"),
    "gateway.archive.prefix": Case("cluster-1", _ARCHIVE),
    "gateway.archive.endpoint": Case("https://minio.example.org:9000", _ARCHIVE),
    "gateway.archive.region": Case("eu-central-1", _ARCHIVE),
    "gateway.archive.existingSecret": Case("credentials", _ARCHIVE),
    "gateway.archive.afterSeconds": Case(600, _ARCHIVE),
    "gateway.networkService.type": Case("LoadBalancer"),
    "gateway.networkService.port": Case(8443),
    "gateway.networkService.externalTrafficPolicy": Case(
        "Local", {"gateway": {"networkService": {"type": "LoadBalancer"}}}
    ),
    "gateway.networkService.annotations": Case(_NOTE),
    "gateway.tls.existingSecret": Case("certificate"),
    "gateway.httpRoute.enabled": Case(value=True, beside={"gateway": {"httpRoute": {"parentRefs": [{"name": "a"}]}}}),
    "gateway.httpRoute.parentRefs": Case([{"name": "other"}], _ROUTE),
    "gateway.httpRoute.hostnames": Case(["poc.example.org"], _ROUTE),
    "gateway.httpRoute.annotations": Case(_NOTE, _ROUTE),
    "gateway.httpRoute.chatPastGateway": Case(value=True, beside=_ROUTE),
    "gateway.ingress.enabled": Case(
        value=True, beside={"gateway": {"ingress": {"hosts": [{"host": "a.example.org"}]}}}
    ),
    "gateway.ingress.className": Case("traefik", _INGRESS),
    "gateway.ingress.annotations": Case(_NOTE, _INGRESS),
    "gateway.ingress.hosts": Case([{"host": "other.example.org"}], _INGRESS),
    "gateway.ingress.tls": Case([{"hosts": ["poc.example.org"], "secretName": "poc-tls"}], _INGRESS),
    "gateway.networkPolicy.enabled": Case(value=False),
    "gateway.networkPolicy.insideFrom": Case(_PEERS, _WATCHED),
    "gateway.networkPolicy.networkFrom": Case(_PEERS),
    "gateway.networkPolicy.ingressFrom": Case(_PEERS),
    "gateway.accessLog": Case("all"),
    "gateway.resources.requests": Case({"cpu": "2"}),
    "gateway.resources.limits": Case({"memory": "2Gi"}),
    "gateway.extraEnv": Case([{"name": "POC_GATEWAY_PAYLOAD_ARTIFACTS", "value": "500"}]),
    "gateway.extraVolumes": Case([{"name": "ca", "configMap": {"name": "company-ca"}}]),
    "gateway.extraVolumeMounts": Case([{"name": "ca", "mountPath": "/etc/company-ca", "readOnly": True}]),
    "gateway.podAnnotations": Case(_NOTE),
    "gateway.podLabels": Case(_NOTE),
    "gateway.nodeSelector": Case({"kubernetes.io/os": "linux"}),
    "gateway.tolerations": Case(_TOLERATIONS),
    "gateway.affinity": Case({"podAntiAffinity": {}}),
    "gateway.priorityClassName": Case("high"),
    "networkPolicy.enabled": Case(value=False),
    "metrics.service": Case(value=True),
    "metrics.serviceMonitor": Case(value=True, beside={"metrics": {"service": True}}),
    "metrics.serviceMonitorLabels": Case({"release": "prometheus"}, _MONITOR),
    "metrics.intervalSeconds": Case(10, _MONITOR),
    "metrics.podMonitor.enabled": Case(value=True),
    "metrics.podMonitor.port": Case("vllm", _POD_MONITOR),
    "metrics.podMonitor.labels": Case({"release": "prometheus"}, _POD_MONITOR),
    "metrics.prometheusRule.enabled": Case(
        value=True, beside={"metrics": {"prometheusRule": {"runbookUrl": "https://docs.example.org/alerts"}}}
    ),
    "metrics.prometheusRule.labels": Case({"release": "prometheus"}, _RULE),
    "metrics.prometheusRule.ruleLabels": Case({"team": "a"}, _RULE),
    "metrics.prometheusRule.disabled": Case(["PoCOperatorAbsent"], _RULE),
    "metrics.prometheusRule.runbookUrl": Case("https://other.example.org", _RULE),
    "metrics.dashboards.enabled": Case(value=True),
    "metrics.dashboards.labels": Case({"grafana": "yes"}, _DASHBOARDS),
    "metrics.dashboards.annotations": Case({"grafana_folder": "PoC"}, _DASHBOARDS),
    "resources.requests": Case({"cpu": "2"}),
    "resources.limits": Case({"memory": "2Gi"}),
    "podAnnotations": Case(_NOTE),
    "podLabels": Case(_NOTE),
    "nodeSelector": Case({"kubernetes.io/os": "linux"}),
    "tolerations": Case(_TOLERATIONS),
    "affinity": Case({"podAntiAffinity": {}}),
    "priorityClassName": Case("high"),
    "extraEnv": Case([{"name": "HTTPS_PROXY", "value": "http://proxy.example.org"}]),
    "extraObjects": Case([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "contacts"}}]),
}
