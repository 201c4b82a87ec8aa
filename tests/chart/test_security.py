# SPDX-License-Identifier: Apache-2.0
"""The operator gets no more rights than it needs, and its pod passes the strictest level."""

import json
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART
from hack.deploy.releases import NAMESPACE, OPERATOR, RESTRICTED, SYSTEM_NAMESPACE
from hack.toolchain.common import UserError
from tests.chart.helm import RELEASE, Values, objects

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

KINDS = tuple(f"poc.gonka.ai/{kind}" for kind in ("pocrounds", "pocvalidations", "poccalibrations"))

#: group/resource[/subresource]: verbs. Nothing else is granted; the core group has no name.
ALLOWED = {
    **dict.fromkeys(KINDS, ("get", "list", "watch", "patch", "delete")),
    **dict.fromkeys((f"{kind}/status" for kind in KINDS), ("patch",)),
    "poc.gonka.ai/pocfleets": ("get", "list", "watch"),
    "poc.gonka.ai/pocfleets/status": ("patch",),
    "/pods": ("list", "watch"),
    "/events": ("create",),
    "/configmaps": ("get",),
}
#: What fleets need beside.
FLEET = {
    "apps/statefulsets": ("get", "list", "create", "patch"),
    "/services": ("get", "list", "create", "patch"),
    "/persistentvolumeclaims": ("get", "list", "create", "patch"),
    "policy/poddisruptionbudgets": ("get", "list", "create", "patch"),
    "networking.k8s.io/networkpolicies": ("get", "list", "create", "patch"),
    "batch/jobs": ("get", "list", "create", "patch", "delete"),
    "apps/controllerrevisions": ("get", "list"),
    "leaderworkerset.x-k8s.io/leaderworkersets": ("get", "list", "create", "patch"),
    "monitoring.coreos.com/podmonitors": ("get", "list", "create", "patch"),
    "/pods/eviction": ("create",),
    "/secrets": ("create",),
    "/nodes": ("list",),
}
FORBIDDEN = {
    **dict.fromkeys(KINDS, ("create", "update", "deletecollection")),
    **dict.fromkeys((f"{kind}/status" for kind in KINDS), ("get", "update")),
    "/pods": ("get", "create", "update", "patch", "delete", "deletecollection"),
    "/pods/exec": ("create",),
    "/pods/log": ("get",),
    "poc.gonka.ai/pocfleets": ("create", "update", "patch", "delete"),
    "apps/statefulsets": ("delete", "update"),
    "leaderworkerset.x-k8s.io/leaderworkersets": ("delete", "update"),
    "batch/jobs": ("update", "deletecollection"),
    "/services": ("delete",),
    "/secrets": ("get", "list", "watch", "patch", "update", "delete"),
    "/configmaps": ("list", "watch", "create"),
    "/serviceaccounts/token": ("create",),
    "/events": ("list", "delete"),
    "/nodes": ("get", "watch", "patch"),
    "/namespaces": ("get", "list", "create", "delete"),
    "apps/deployments": ("get", "patch", "delete"),
    "rbac.authorization.k8s.io/clusterrolebindings": ("create",),
    "apiextensions.k8s.io/customresourcedefinitions": ("create", "patch", "delete"),
}
#: What is granted without fleets by ``rbac.deletePods``.
DELETES_PODS = ("/pods/eviction", "create")
GRANTS = [(what, verb, True) for what, verbs in (*ALLOWED.items(), *FLEET.items()) for verb in verbs]
GRANTS += [(what, verb, False) for what, verbs in FORBIDDEN.items() for verb in verbs]
FLEET_GRANTS = {(what, verb) for what, verbs in FLEET.items() for verb in verbs}
#: Changes of the operator's container that the level must refuse.
TOO_MUCH = {"runAsUser": 0, "allowPrivilegeEscalation": True, "capabilities": {"add": ["NET_ADMIN"]}}


def may(kube: Kube, what: str, verb: str, *, account: str = OPERATOR) -> bool:
    """Ask the API server whether the account may do this to the worker's namespace."""
    group, resource, *rest = what.split("/")
    attributes = {"namespace": NAMESPACE, "group": group, "resource": resource, "verb": verb}
    attributes |= {"subresource": rest[0]} if rest else {}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": f"system:serviceaccount:{SYSTEM_NAMESPACE}:{account}", "resourceAttributes": attributes},
    }
    answer = kube.kubectl("create", "-f", "-", "-o", "jsonpath={.status.allowed}", stdin=json.dumps(review))
    return {"true": True, "false": False}[answer]


@pytest.mark.parametrize(("what", "verb", "allowed"), GRANTS)
def test_the_operator_may_do_what_it_needs_and_nothing_else(kube: Kube, what: str, verb: str, allowed: bool) -> None:
    assert may(kube, what, verb) is allowed


@pytest.mark.parametrize(
    ("values", "more", "less"),
    [
        ({}, set(), set()),
        ({"rbac": {"deletePods": True}}, set(), set()),
        ({"rbac": {"readConfigMaps": False}}, set(), {("/configmaps", "get")}),
        ({"rbac": {"readSecrets": True}, "gateway": {"enabled": False}}, set(), set()),
        ({"auth": {"existingSecret": "token"}}, set(), set()),
        ({"fleets": {"enabled": False}}, set(), FLEET_GRANTS),
        ({"fleets": {"enabled": False}, "rbac": {"deletePods": True}}, {DELETES_PODS}, FLEET_GRANTS),
    ],
)
def test_the_role_grants_what_the_table_says(
    kube: Kube, values: dict[str, Any], more: set[tuple[str, str]], less: set[tuple[str, str]]
) -> None:
    role = next(
        body
        for body in objects(kube, OPERATOR_CHART, values)
        if body["kind"] == "ClusterRole" and body["metadata"]["name"] == f"{RELEASE}-{OPERATOR}:{SYSTEM_NAMESPACE}"
    )
    granted = {
        (f"{group}/{resource}", verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    named = {("/namespaces", "get"), ("/secrets", "get")}  # of kube-system, and of the pods' token alone
    tables = (*ALLOWED.items(), *FLEET.items())
    assert granted == {(what, verb) for what, verbs in tables for verb in verbs} - less | more | named
    assert [rule["resourceNames"] for rule in role["rules"] if "namespaces" in rule["resources"]] == [["kube-system"]]


def test_the_operator_reads_the_secret_of_the_pods_token_and_no_other(kube: Kube) -> None:
    for auth, name in (({"existingSecret": "token"}, "token"), ({}, "vllm-poc-token")):
        bodies = objects(kube, OPERATOR_CHART, {"auth": auth})
        rules = [rule for body in bodies for rule in body.get("rules", []) if "secrets" in rule["resources"]]
        read = [rule for rule in rules if rule["verbs"] != ["create"]]
        assert read == [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": [name], "verbs": ["get"]}]


def test_with_a_gateway_it_alone_reads_secrets(kube: Kube) -> None:
    bodies = objects(kube, OPERATOR_CHART, {"rbac": {"readSecrets": True}})
    readers = [
        body["metadata"]["name"]
        for body in bodies
        for rule in body.get("rules", [])
        if "secrets" in rule["resources"] and "get" in rule["verbs"] and "resourceNames" not in rule
    ]
    assert readers == [f"{RELEASE}-{OPERATOR}-gateway:{SYSTEM_NAMESPACE}"]


def test_watched_namespaces_get_roles_and_the_cluster_none(kube: Kube) -> None:
    watched = [NAMESPACE, "default"]
    less = {"rbac": {"aggregate": False}, "crds": {"enabled": False}, "gateway": {"enabled": False}}
    values = {"watchNamespaces": watched, **less}
    found = [body for body in objects(kube, OPERATOR_CHART, values) if not is_hook(body)]
    rights = [(body["kind"], body["metadata"].get("namespace")) for body in found if "Role" in body["kind"]]
    # Where the operator itself runs, it keeps its Lease, and reads presets.
    namespaces = [*watched, SYSTEM_NAMESPACE, SYSTEM_NAMESPACE]
    assert sorted(rights) == sorted((kind, ns) for kind in ("Role", "RoleBinding") for ns in namespaces)
    subjects = [subject for body in found for subject in body.get("subjects", [])]
    account = {"kind": "ServiceAccount", "name": f"{RELEASE}-{OPERATOR}", "namespace": SYSTEM_NAMESPACE}
    assert subjects == [account] * len(namespaces)


@pytest.mark.parametrize(
    ("values", "namespace"),
    [
        ({}, "kube-system"),
        ({"watchNamespaces": [NAMESPACE]}, SYSTEM_NAMESPACE),
        ({"leaderElection": {"namespace": "kube-public"}}, "kube-public"),
        ({"watchNamespaces": [NAMESPACE], "leaderElection": {"namespace": "kube-public"}}, "kube-public"),
    ],
)
def test_the_lease_is_where_its_rights_are(kube: Kube, values: Values, namespace: str) -> None:
    bodies = objects(kube, OPERATOR_CHART, values)
    rights = [body["metadata"]["namespace"] for body in bodies if body["metadata"]["name"].endswith("-lease")]
    assert rights == [namespace] * 2
    (found,) = [
        one for one in bodies if one["kind"] == "Deployment" and one["metadata"]["name"] == f"{RELEASE}-{OPERATOR}"
    ]
    assert f"--lease-namespace={namespace}" in found["spec"]["template"]["spec"]["containers"][0]["args"]


def is_hook(body: dict[str, Any]) -> bool:
    """Whether helm makes the object for `helm uninstall` or `helm test` alone."""
    return "helm.sh/hook" in body["metadata"].get("annotations", {})


def test_users_get_rounds_with_the_clusters_own_roles(kube: Kube) -> None:
    roles = [body for body in objects(kube, OPERATOR_CHART, {"watchNamespaces": [NAMESPACE]}) if "rules" in body]
    aggregated = {body["metadata"]["name"] for body in roles if body["kind"] == "ClusterRole"}
    assert aggregated == {f"{RELEASE}-{OPERATOR}-{role}:{SYSTEM_NAMESPACE}" for role in ("view", "edit")}


def test_the_operators_namespace_enforces_the_restricted_level(kube: Kube) -> None:
    labels = kube.get("namespace", SYSTEM_NAMESPACE)["metadata"]["labels"]
    assert labels.items() >= RESTRICTED.items()


def test_the_operators_pod_passes_the_restricted_level(kube: Kube) -> None:
    create(kube, pod_of(kube, OPERATOR))


@pytest.mark.parametrize(("field", "value"), TOO_MUCH.items(), ids=TOO_MUCH)
def test_the_restricted_level_would_refuse_more(kube: Kube, field: str, value: object) -> None:
    pod = pod_of(kube, OPERATOR)
    pod["spec"]["containers"][0]["securityContext"][field] = value
    with pytest.raises(UserError, match="violates PodSecurity"):
        create(kube, pod)


def pod_of(kube: Kube, deployment: str) -> dict[str, Any]:
    """Return a pod as the Deployment on the cluster makes them."""
    template = kube.get("--namespace", SYSTEM_NAMESPACE, "deployment", deployment)["spec"]["template"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "restricted"}, "spec": template["spec"]}


def create(kube: Kube, pod: dict[str, Any]) -> None:
    kube.kubectl("--namespace", SYSTEM_NAMESPACE, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
