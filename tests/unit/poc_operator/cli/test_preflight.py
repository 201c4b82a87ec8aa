# SPDX-License-Identifier: Apache-2.0
"""What ``check`` finds, each with a remedy."""

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from hack.generate.crds import crd
from hack.generate.runbooks import rules
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.cli import preflight
from poc_operator.cli.check_commands import KINDS
from poc_operator.cli.preflight import Check, Level
from tests.support.fakes.api_paths import ApiPaths
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Run

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/vllm-poc-operator"
EVERY_ROUND = "/apis/poc.gonka.ai/v1alpha1/pocrounds"
OLD = seen.metadata("round-1", creationTimestamp="2020-01-02T00:00:00+00:00")
FORWARDING = f"{seen.GATEWAY}/rounds/poc/round-1/forwarding"


def a_round_with(type_: str, status: str, *reasons: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    degraded = ",".join(reasons) if type_ == "Degraded" else ""
    return seen.a_round(conditions=[seen.condition(type_, status, reasons[0], "why")], degraded=degraded, **more)


def a_lease(seconds: float) -> dict[str, Any]:
    renewed = (seen.START - timedelta(seconds=seconds)).isoformat()
    return {"spec": {"holderIdentity": "operator-1", "renewTime": renewed, "leaseDurationSeconds": 15}}


def a_certificate(*, days: int) -> Check:
    return preflight.gateway_certificate("gateway", seen.START + timedelta(days=days), seen.START)


def a_node(gpus: str, product: str | None) -> dict[str, Any]:
    labels = {"nvidia.com/gpu.product": product} if product else {}
    return {"metadata": {"name": "node-1", "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": gpus}}}


def test_the_crds_of_this_version_are_right() -> None:
    assert [preflight.crd(kind, crd(kind), "apply").level for kind in KINDS] == [Level.OK] * 4


def test_a_crd_of_another_version_names_the_field() -> None:
    body = json.loads(json.dumps(crd(PoCFleet)))
    del body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["healing"]
    found = preflight.crd(PoCFleet, body, "apply")
    assert (found.level, found.finding) == (Level.ERROR, "it is of another version: it has no field spec.healing")
    assert preflight.crd(PoCFleet, None, "apply").level is Level.ERROR
    body["spec"]["versions"][0]["served"] = False
    assert preflight.crd(PoCFleet, body, "apply").finding == "it does not serve v1alpha1"


@pytest.mark.parametrize(
    ("check", "level", "part"),
    [
        (preflight.lease(a_lease(5), seen.START, "wait"), Level.OK, "operator-1 holds it"),
        (preflight.lease(a_lease(40), seen.START, "wait"), Level.ERROR, "has not renewed it for 40 s"),
        (preflight.lease({"spec": {}}, seen.START, "wait"), Level.ERROR, "nobody holds it"),
        (preflight.lease(None, seen.START, "wait"), Level.ERROR, "no operator has ever held it"),
        (preflight.gpus([a_node("8", "NVIDIA-H200")]), Level.OK, "8 GPUs on 1 Kubernetes nodes: NVIDIA-H200"),
        (preflight.gpus([a_node("8", None)]), Level.WARNING, "has no label nvidia.com/gpu.product"),
        (preflight.gpus([a_node("0", None)]), Level.WARNING, "none of 1 Kubernetes nodes offers"),
        (preflight.api_server(0.2), Level.OK, "it answers within 0.2 s"),
        (preflight.api_server(4.5), Level.WARNING, "it took 4.5 s"),
        (preflight.gateway_disk("gateway", full=False), Level.OK, "it has room"),
        (preflight.gateway_disk("gateway", full=True), Level.ERROR, "nothing new is stored"),
        (a_certificate(days=8), Level.OK, "it is valid until"),
        (a_certificate(days=6), Level.WARNING, "it expires at"),
        (a_certificate(days=0), Level.ERROR, "it has expired at"),
        (preflight.claim("ns", "c", {"status": {"phase": "Bound"}}, of="x"), Level.OK, "bound"),
        (preflight.claim("ns", "c", {"status": {"phase": "Pending"}}, of="x"), Level.WARNING, "Pending"),
        (preflight.claim("ns", "c", None, of="x"), Level.ERROR, "does not exist"),
        (preflight.secret("ns", "s", of="x", exists=False), Level.ERROR, "does not exist"),
    ],
)
def test_findings(check: Check, level: Level, part: str) -> None:
    assert check.level is level
    assert part in check.finding
    assert bool(check.remedy) == (level is not Level.OK)


def test_a_fleet_that_cannot_go_on_is_an_error_with_the_remedy() -> None:
    stalled = seen.condition("Stalled", "True", "ImageMissing", "no image is named")
    (found,) = preflight.fleets([PoCFleet.parse(seen.a_fleet(conditions=[stalled]))], "wait")
    assert (found.level, found.finding) == (Level.ERROR, "ImageMissing: no image is named")
    assert found.remedy.startswith("Set `spec.image`")


def _whole(api: ApiPaths) -> Mapping[str, Any]:
    ready = seen.condition("Ready", "True", "AllReplicasReady")
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}, {"secret": {"secretName": "tls"}}]
    spec = {"containers": [{"name": "gateway", "env": []}], "volumes": volumes}
    api.answers |= {
        **{f"{CRDS}/{kind.KIND.plural}.poc.gonka.ai": crd(kind) for kind in KINDS},
        LEASE: {"spec": {"holderIdentity": "me", "renewTime": "2999-01-01T00:00:00Z"}},
        "/api/v1/services": [seen.a_service()],
        "/apis/apps/v1/namespaces/poc-system/deployments/gateway": seen.a_deployment("gateway", spec=spec),
        "/version": {"gitVersion": "v1.34.0"},
        f"{seen.GATEWAY}/rounds": {"rounds": []},
        f"{seen.GATEWAY}/health": {"status": "OK"},
        "/api/v1/namespaces/poc-system/persistentvolumeclaims/data": {"status": {"phase": "Bound"}},
        "/api/v1/namespaces/poc-system/secrets/tls": {"metadata": {}},
        "/api/v1/nodes": [a_node("8", "NVIDIA-H200")],
        "/apis/poc.gonka.ai/v1alpha1/pocfleets": [seen.a_fleet(conditions=[ready])],
        EVERY_ROUND: [seen.a_round(), a_round_with("Progressing", "False", "PodsIdle", state="Failed")],
        FORWARDING: {"receiver": None, "backlog": 0, "last_error": None},
    }
    return api.answers


def test_a_whole_cluster_is_right(run: Run, api: ApiPaths) -> None:
    _whole(api)
    done = run("check", "-o", "json")
    assert [one for one in json.loads(done.out) if one["level"] != "ok"] == []
    assert done.code == 0
    (asked,) = [one for one in api.asked if one.path.endswith("/secrets/tls")]
    assert "PartialObjectMetadata" in asked.headers["accept"]


@pytest.mark.parametrize(
    ("path", "answer", "about"),
    [
        (f"{CRDS}/pocrounds.poc.gonka.ai", (404, {}), "CRD pocrounds"),
        (seen.DEPLOYMENTS, [seen.a_deployment("operator", available=0)], "operator"),
        (LEASE, (404, {}), "Lease"),
        (f"{seen.GATEWAY}/rounds", (503, {"message": "no endpoints available"}), "gateway poc-system/gateway"),
        (f"{seen.GATEWAY}/health", {"status": "OK", "storage": "full"}, "gateway poc-system/gateway disk"),
        (
            f"{seen.GATEWAY}/health",
            {"status": "OK", "certificate_expires": "2020-01-02T00:00:00+00:00"},
            "gateway poc-system/gateway certificate",
        ),
        ("/api/v1/namespaces/poc-system/secrets/tls", (404, {}), "Secret poc-system/tls"),
        ("/api/v1/namespaces/poc-system/persistentvolumeclaims/data", (404, {}), "PVC poc-system/data"),
        (EVERY_ROUND, [a_round_with("Progressing", "False", "PodsUnreachable", state="Pending")], "round poc/round-1"),
        (EVERY_ROUND, [a_round_with("Accepted", "False", "ModelMismatch", state="Pending")], "round poc/round-1"),
        (EVERY_ROUND, [a_round_with("Degraded", "True", "DeliveriesFailing")], "round poc/round-1"),
        (EVERY_ROUND, [a_round_with("Degraded", "True", "GatewayUnreachable")], "round poc/round-1"),
        (FORWARDING, {"receiver": "https://network:1/x", "backlog": 3, "last_error": "HTTP 502"}, "round poc/round-1"),
        # In a namespace that no operator watches.
        (EVERY_ROUND, [{**seen.a_round(), "metadata": OLD, "status": {}}], "round poc/round-1"),
        (EVERY_ROUND, [{**seen.a_round(), "metadata": OLD | {"generation": 5}}], "round poc/round-1"),
    ],
)
def test_each_fault_is_found_and_fails(run: Run, api: ApiPaths, path: str, answer: Any, about: str) -> None:  # noqa: ANN401
    _whole(api)
    api.answers[path] = answer
    done = run("check", "-o", "json")
    assert {one["about"] for one in json.loads(done.out) if one["level"] == "error"} == {about}
    assert done.code == 1


def test_a_round_is_told_by_each_of_its_reasons_with_the_remedy(run: Run, api: ApiPaths) -> None:
    _whole(api)
    api.answers[EVERY_ROUND] = [a_round_with("Degraded", "True", "SlotsWaiting", "DeliveriesFailing")]
    api.answers[FORWARDING] = {"receiver": "https://network:1/x", "backlog": 3, "last_error": "HTTP 502: Bad Gateway"}
    found = [one for one in json.loads(run("check", "-o", "json").out) if one["about"] == "round poc/round-1"]
    assert [(one["level"], one["finding"].partition(":")[0]) for one in found] == [
        ("warning", "SlotsWaiting"),
        ("error", "DeliveriesFailing"),
        ("error", "ReceiverFailing"),
    ]
    assert found[0]["remedy"].startswith("Wait for the replacement pod")
    assert [one["remedy"].endswith("kubectl poc -n poc explain round-1") for one in found] == [True, False, True]
    assert "does not take results: HTTP 502: Bad Gateway" in found[2]["finding"]


UNSEEN = {"conditions": [seen.condition("Ready", "Unknown", "Pending", "waiting for the operator")]}
NEW = {"metadata": seen.metadata("new", creationTimestamp="2999-01-01T00:00:00+00:00"), "status": UNSEEN}
LOOK = "wait a minute if the operator has just started, then look at its log: kubectl -n poc-system logs deployment/op"


@pytest.mark.parametrize(
    ("path", "answer", "remedy"),
    [
        (LEASE, (404, {}), LOOK),
        (LEASE, a_lease(60), LOOK),
        (EVERY_ROUND, [seen.a_round() | NEW], LOOK),
        ("/apis/poc.gonka.ai/v1alpha1/pocfleets", [seen.a_fleet() | NEW], LOOK),
        (EVERY_ROUND, [a_round_with("Degraded", "True", "GatewayUnreachable")], "Check that the gateway runs"),
        (EVERY_ROUND, [a_round_with("Degraded", "True", "DeliveriesFailing")], "`HTTP 507`: give the gateway's"),
        (
            f"{seen.GATEWAY}/rounds",
            (503, {"message": "no endpoints available"}),
            "wait a minute if the gateway has just started, then look at its log: kubectl -n poc-system logs depl",
        ),
    ],
)
def test_nothing_that_is_found_leads_back_to_the_check(
    run: Run,
    api: ApiPaths,
    path: str,
    answer: Any,  # noqa: ANN401
    remedy: str,
) -> None:
    """As after a restart of operator and gateway: neither itself nor what sends there says what to do."""
    _whole(api)
    api.answers[path] = answer
    (told,) = [one for one in json.loads(run("check", "-o", "json").out) if one["level"] != "ok"]
    assert told["remedy"].startswith(remedy)
    assert not [word for word in ("poc check", "explain") if word in f"{told['finding']} {told['remedy']}"]


def test_a_user_who_may_not_look_at_the_operator_is_told_what_to_do(run: Run, api: ApiPaths) -> None:
    _whole(api)
    api.answers |= {seen.DEPLOYMENTS: (403, {"message": "no"}), EVERY_ROUND: [seen.a_round() | NEW]}
    (told,) = [one for one in json.loads(run("check", "-o", "json").out) if one["about"] == "round poc/new"]
    assert told["remedy"].endswith("kubectl -n NAMESPACE logs deployment/vllm-poc-operator --tail=50")


@pytest.mark.parametrize(
    ("operators", "remedy"),
    [
        ([], "install the chart vllm-poc-operator, which brings them"),
        ((403, {"message": "no"}), "install the chart vllm-poc-operator, which brings them"),
        ([seen.a_deployment("operator")], "apply the CRDs of this version: kubectl apply --server-side -f crds/"),
    ],
)
def test_crds_are_applied_only_beside_a_chart(
    run: Run,
    api: ApiPaths,
    operators: Any,  # noqa: ANN401
    remedy: str,
) -> None:
    """Helm takes over no CRDs that somebody else has applied, so that the chart could not be installed any more."""
    _whole(api)
    api.answers |= {f"{CRDS}/pocrounds.poc.gonka.ai": (404, {}), seen.DEPLOYMENTS: operators}
    (told,) = [one for one in json.loads(run("check", "-o", "json").out) if one["about"] == "CRD pocrounds"]
    assert (told["finding"], told["remedy"].startswith(remedy)) == ("it is not installed", True), told


@pytest.mark.parametrize("state", ["Complete", "Failed"])
def test_what_a_receiver_lacks_is_told_also_of_rounds_that_are_over(run: Run, api: ApiPaths, state: str) -> None:
    """And nothing else of them: what failed them is over too."""
    _whole(api)
    api.answers[EVERY_ROUND] = [a_round_with("Progressing", "False", "PodsIdle", state=state)]
    assert {one["level"] for one in json.loads(run("check", "-o", "json").out)} == {"ok"}
    api.answers[FORWARDING] = {"receiver": "https://network:1/x", "backlog": 3, "last_error": "HTTP 502: Bad Gateway"}
    (told,) = [one for one in json.loads(run("check", "-o", "json").out) if one["level"] == "error"]
    assert (told["about"], told["finding"].partition(":")[0]) == ("round poc/round-1", "ReceiverFailing")


def test_what_a_receiver_lacks_is_told_also_of_rounds_that_were_deleted(run: Run, api: ApiPaths) -> None:
    _whole(api)
    gone = FORWARDING.replace("round-1", "gone")
    there = seen.a_round()
    uids = {"round-1": there["metadata"]["uid"], "gone": "uid-of-before"}
    known = [{"namespace": "poc", "name": name, "uid": uid} for name, uid in uids.items()]
    api.answers |= {EVERY_ROUND: [there], f"{seen.GATEWAY}/rounds": {"rounds": known}}
    api.answers[gone] = {"receiver": "https://network:1/x", "backlog": 3, "last_error": None}
    assert {one["level"] for one in json.loads(run("check", "-o", "json").out)} == {"ok"}, "it takes them"
    api.answers[gone]["last_error"] = "HTTP 502: Bad Gateway"
    (told,) = [one for one in json.loads(run("check", "-o", "json").out) if one["level"] == "error"]
    assert told == {
        "about": "round poc/gone",
        "level": "error",
        "finding": "ReceiverFailing: The receiver https://network:1/x does not take results: HTTP 502: Bad Gateway. "
        "The round was deleted, and 3 results wait at the gateway, which tries again by itself.",
        "remedy": "Look at the receiver's log: it runs, and fails. kubectl poc -n poc round results gone",
    }
    api.answers[EVERY_ROUND] = []
    assert run("check", "-n", "poc").code == 1, "no round is left"
    queries = [one.query for one in api.asked if one.query.get("undelivered")]
    assert {tuple(sorted(query)) for query in queries} == {("limit", "undelivered")}


def test_a_deleted_round_is_told_of_also_if_another_has_its_name(run: Run, api: ApiPaths) -> None:
    _whole(api)
    known = [{"namespace": "poc", "name": "round-1", "uid": uid} for uid in ("uid-of-before", "uid-before-that")]
    api.answers |= {EVERY_ROUND: [seen.a_round()], f"{seen.GATEWAY}/rounds": {"rounds": known}}
    well, told = api.answers[FORWARDING], {"receiver": "https://network:1/x", "backlog": 3, "last_error": "HTTP 502"}
    api.answers[FORWARDING] = lambda query: {"uid-of-before": (500, {}), "uid-before-that": told}.get(
        query.get("uid", [""])[0], well
    )
    found = [(one["about"], one["level"]) for one in json.loads(run("check", "-o", "json").out)]
    wrong = [(about, level) for about, level in found if level != "ok"]
    assert wrong == [("round poc/round-1", "warning"), ("round poc/round-1", "error")], "one that fails hides no other"


def test_a_user_of_one_namespace_is_told_of_deleted_rounds_of_that_one(run: Run, api: ApiPaths) -> None:
    _whole(api)
    api.answers |= {EVERY_ROUND: (403, {"message": "no"}), seen.ROUNDS: [seen.a_round()]}
    run("check")
    (query,) = [one.query for one in api.asked if one.query.get("undelivered")]
    assert query["namespace"] == ["poc"]


def test_an_older_gateway_tells_of_no_deleted_rounds(run: Run, api: ApiPaths) -> None:
    _whole(api)
    answered: Any = api.answers.pop(f"{seen.GATEWAY}/rounds")
    api.answers[f"{seen.GATEWAY}/rounds"] = lambda query: (
        (422, {"detail": "extra"}) if "undelivered" in query else answered
    )
    assert run("check").code == 0


def test_a_full_disk_and_a_silent_gateway_are_told_once(run: Run, api: ApiPaths) -> None:
    _whole(api)
    api.answers[EVERY_ROUND] = [seen.a_round(f"round-{number}") for number in range(3)]
    api.answers[f"{seen.GATEWAY}/health"] = {"status": "OK", "storage": "full"}
    api.answers |= {FORWARDING.replace("-1/", f"-{number}/"): api.answers[FORWARDING] for number in range(3)}
    told = [one["about"] for one in json.loads(run("check", "-o", "json").out) if one["level"] == "error"]
    assert told == ["gateway poc-system/gateway disk"]
    api.answers[f"{seen.GATEWAY}/health"] = (503, {"message": "no endpoints available"})
    api.asked.clear()
    assert run("check").code == 1
    assert len([one for one in api.asked if one.path == f"{seen.GATEWAY}/health"]) == 2


def test_rounds_that_wait_for_what_may_come_are_no_error(run: Run, api: ApiPaths) -> None:
    _whole(api)
    api.answers[EVERY_ROUND] = [a_round_with("Progressing", "False", "NoPodReady", state="Pending")]
    assert run("check").code == 0
    api.answers[EVERY_ROUND] = [a_round_with("Suspended", "True", "Suspended", state="Suspended")]
    assert {one["level"] for one in json.loads(run("check", "-o", "json").out)} == {"ok"}
    (rule,) = [one for one in rules() if one["alert"] == "PoCWorkImpaired"]
    assert set(re.findall(r'reason=~"(.+)"', rule["expr"])[0].split("|")) < preflight.PASSING


@pytest.mark.parametrize(
    ("pods", "level"),
    [
        ({"fleetRef": {"name": "demo"}}, "warning"),
        ({"fleetRef": None}, "warning"),
        ({"fleetRef": None, "selector": {"matchLabels": {"app": "own"}}}, "error"),
    ],
)
def test_pods_of_a_fleet_may_come_and_labels_do_not(run: Run, api: ApiPaths, pods: Any, level: str) -> None:  # noqa: ANN401
    _whole(api)
    body = a_round_with("Progressing", "False", "NoMatchingPods", state="Pending")
    body["spec"] |= pods
    api.answers[EVERY_ROUND] = [body]
    (told,) = [one["level"] for one in json.loads(run("check", "-o", "json").out) if "NoMatchingPods" in one["finding"]]
    assert told == level


def test_a_complete_round_without_results_is_a_warning(run: Run, api: ApiPaths) -> None:
    _whole(api)
    body = seen.a_round(state="Complete")
    body["status"]["totals"]["delivered"] = 0
    api.answers[EVERY_ROUND] = [body]
    (told,) = [one["finding"] for one in json.loads(run("check", "-o", "json").out) if one["level"] == "warning"]
    assert told == "NoResults: No result was delivered."


def test_rounds_are_checked_without_a_gateway_and_in_the_own_namespace_alone(run: Run, api: ApiPaths) -> None:
    _whole(api)
    api.answers["/api/v1/services"] = []
    api.answers[EVERY_ROUND] = (403, {"message": "pocrounds is forbidden"})
    api.answers[seen.ROUNDS] = [a_round_with("Degraded", "True", "GatewayUnreachable")]
    assert [one["about"] for one in json.loads(run("check", "-o", "json").out) if one["level"] == "error"] == [
        "round poc/round-1"
    ]


def test_the_alert_and_the_check_of_a_certificate_begin_at_the_same_time() -> None:
    (rule,) = [one for one in rules() if one["alert"] == "PoCGatewayCertificateExpires"]
    assert rule["expr"].endswith(f" < {preflight.CERTIFICATE_LEFT.total_seconds():.0f}")


def test_what_may_not_be_read_is_a_warning(run: Run, api: ApiPaths) -> None:
    _whole(api)
    api.answers["/api/v1/nodes"] = (403, {"message": "nodes is forbidden"})
    done = run("check")
    assert (done.code, "nodes is forbidden" in done.out) == (0, True)


def test_an_operator_that_was_scaled_away_is_scaled_back(run: Run, api: ApiPaths) -> None:
    _whole(api)
    scaled = seen.a_deployment("vllm-poc-operator", available=0)
    scaled["spec"]["replicas"] = 0
    api.answers[seen.DEPLOYMENTS] = [scaled]
    (told,) = [one for one in json.loads(run("check", "-o", "json").out) if one["about"] == "operator"]
    assert told["finding"].endswith("poc-system/vllm-poc-operator is scaled to 0 replicas")
    assert told["remedy"] == "kubectl -n poc-system scale deployment vllm-poc-operator --replicas=1"
    assert "is scaled to 0 replicas: states and rates are those of before" in run("status").out.replace("\n", " ")


def test_of_several_operators_the_one_that_should_run_is_told_of(run: Run, api: ApiPaths) -> None:
    _whole(api)
    scaled = seen.a_deployment("vllm-poc-operator", available=0)
    scaled["spec"]["replicas"] = 0
    api.answers[seen.DEPLOYMENTS] = [scaled, seen.a_deployment("blue-vllm-poc-operator", available=0)]
    (told,) = [one for one in json.loads(run("check", "-o", "json").out) if one["about"] == "operator"]
    assert told["finding"].endswith("poc-system/blue-vllm-poc-operator has no available pod")
    assert "describe pods" in told["remedy"]
