# SPDX-License-Identifier: Apache-2.0
"""The objects of a fleet: what every spec that the schema accepts yields, and what single fields change."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.merge import PatchError
from poc_operator.fleets.plan import FleetSnapshot, key_of, plan
from poc_operator.fleets.render import HASH, Object, render
from poc_operator.fleets.resolve import Refusal, Resolved, resolve
from poc_operator.planning.eligibility import NAMED_PODS
from tests.support.builders.specs import FULL, edges, specs
from tests.support.checks.admission import admitted
from tests.unit.poc_operator.build import NOW
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet

_DNS_LABEL = re.compile("[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def rendered(fleet: PoCFleet) -> dict[str, Object]:
    """Return the objects by kind and name."""
    found = resolve(fleet.spec, AROUND)
    assert isinstance(found, Resolved), found
    return {"/".join(key_of(body)): body for body in render(fleet, found, AROUND)}


def pod_of(**spec: Any) -> Object:  # noqa: ANN401
    template: Object = rendered(a_fleet(**spec))["StatefulSet/demo"]["spec"]["template"]
    return template


def container_of(**spec: Any) -> Object:  # noqa: ANN401
    found: Object = pod_of(**spec)["spec"]["containers"][0]
    return found


def check(spec: dict[str, Any]) -> bool:
    """Check what an accepted spec yields, objects or words; return whether it is the former."""
    fleet = a_fleet(**spec)
    found = resolve(fleet.spec, AROUND)
    if isinstance(found, Refusal):
        assert found.message
        assert found.reason in {
            Reason.PRESET_UNUSABLE,
            Reason.GPU_UNSUPPORTED,
            Reason.CACHE_TOO_SMALL,
            Reason.DECODE_UNSUPPORTED,
        }
        return False
    try:
        objects = render(fleet, found, AROUND)
    except PatchError as error:
        return not str(error).startswith("spec.podTemplate.") and pytest.fail(str(error))
    assert json.loads(json.dumps(objects)) == objects
    for body in objects:
        metadata = body["metadata"]
        assert _DNS_LABEL.fullmatch(metadata["name"])
        assert metadata["labels"][FLEET_LABEL] == "demo"
        assert [owner["uid"] for owner in metadata["ownerReferences"]] == ["fleet-uid"]
    assert len({key_of(body) for body in objects}) == len(objects)
    _check_pods(fleet, objects[-1])
    return True


def _check_pods(fleet: PoCFleet, body: Object) -> None:
    spec = body["spec"]
    assert (spec["replicas"], spec["updateStrategy"]["type"]) == (fleet.spec.replicas, "OnDelete")
    template = spec["template"]
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (vllm,) = [one for one in template["spec"]["containers"] if one["name"] == "vllm"]
    variables = {one["name"]: one for one in vllm["env"]}
    assert len(variables) == len(vllm["env"])
    # Closed, unless the spec says otherwise; never both.
    assert ("VLLM_POC_OPEN" in variables) == fleet.spec.auth.open != ("VLLM_POC_TOKEN_FILE" in variables)
    assert vllm["args"][1] == "--enable-poc"
    assert vllm["args"][-len(fleet.spec.engine_args or []) :] == (fleet.spec.engine_args or vllm["args"])


def test_every_accepted_edge_can_be_rendered() -> None:
    done = refused = 0
    for name, spec in edges(PoCFleet):
        stored, flaws = admitted(PoCFleet, spec)
        if not flaws:
            try:
                if check(stored):
                    done += 1
                else:
                    refused += 1
            except Exception as error:
                error.add_note(name)
                raise
    assert done > NAMED_PODS * 20
    assert refused > 0


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_accepted_spec_can_be_rendered(data: st.DataObject) -> None:
    stored, flaws = admitted(PoCFleet, data.draw(specs(PoCFleet)))
    assert flaws == []
    check(stored)


@pytest.mark.parametrize("spec", FULL[PoCFleet])
def test_full_specs_are_rendered(spec: dict[str, Any]) -> None:
    assert check(admitted(PoCFleet, spec)[0])


def test_the_objects_of_a_fleet() -> None:
    fleet = ["NetworkPolicy/demo", "PodDisruptionBudget/demo", "Service/demo", "Service/demo-pods", "StatefulSet/demo"]
    assert sorted(rendered(a_fleet())) == fleet
    assert sorted(rendered(a_fleet(cache={"size": "1Gi"}))) == [
        *fleet[:1],
        "PersistentVolumeClaim/demo-cache",
        *fleet[1:],
    ]


def test_flags_come_in_an_order_in_which_the_users_win() -> None:
    spec = {"model": {"preset": "minimax-m2.7"}, "servedName": "m", "host": "::", "engineArgs": ["--max-num-seqs=1"]}
    args = container_of(**spec)["args"]
    assert args[:6] == [
        "MiniMaxAI/MiniMax-M2.7",
        "--enable-poc",
        "--host=::",
        "--port=8000",
        "--served-model-name=m",
        "--tensor-parallel-size=2",
    ]
    assert [flag for flag in args if flag.startswith("--max-num-seqs")] == ["--max-num-seqs=608", "--max-num-seqs=1"]


def test_pods_run_where_their_gpus_are() -> None:
    preset = pod_of(model={"preset": "minimax-m2.7"})["spec"]
    assert preset["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert preset["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    cpu = pod_of()["spec"]
    assert "nodeSelector" not in cpu
    assert cpu["containers"][0]["resources"] == {}


def test_the_token_is_that_which_the_operator_sends() -> None:
    found = resolve(a_fleet().spec, AROUND)
    assert isinstance(found, Resolved)
    objects = render(a_fleet(), found, replace(AROUND, token_secret="own"))  # noqa: S106 - a name
    pod = objects[-1]["spec"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if "secret" in one]
    assert volume["secret"] == {"secretName": "own", "items": [{"key": "token", "path": "token"}]}
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == volume["name"]]
    variables = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert variables["VLLM_POC_TOKEN_FILE"] == f"{mount['mountPath']}/token"
    assert "VLLM_POC_TOKEN" not in variables
    # Kubernetes never changes a file that is mounted alone.
    assert mount == {"name": volume["name"], "mountPath": "/etc/vllm-poc-operator/token", "readOnly": True}


def test_open_pods_have_no_token() -> None:
    spec = pod_of(auth={"open": True}, callbackAllow=["*"])["spec"]
    assert not [one for one in spec["volumes"] if "secret" in one]
    assert {one["name"] for one in spec["containers"][0]["volumeMounts"]} == {one["name"] for one in spec["volumes"]}


def test_a_users_variable_replaces_that_of_a_preset() -> None:
    spec = {"model": {"preset": "minimax-m2.7"}, "gpu": {"product": "NVIDIA-B200"}}
    assert {"name": "NCCL_NVLS_ENABLE", "value": "0"} in container_of(**spec)["env"]
    own = container_of(**spec, env=[{"name": "NCCL_NVLS_ENABLE", "value": "1"}])["env"]
    assert [one["value"] for one in own if one["name"] == "NCCL_NVLS_ENABLE"] == ["1"]


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({}, {"emptyDir": {}}),
        ({"existingClaim": "own"}, {"persistentVolumeClaim": {"claimName": "own"}}),
        ({"size": "1Gi"}, {"persistentVolumeClaim": {"claimName": "demo-cache"}}),
    ],
)
def test_weights_are_kept_where_the_cache_is(cache: dict[str, str], volume: Object) -> None:
    volumes = pod_of(cache=cache)["spec"]["volumes"]
    assert volumes[1] == {"name": "cache", **volume}


def test_replicas_change_no_pod_and_other_fields_do() -> None:
    assert pod_of(replicas=1) == pod_of(replicas=7)
    assert pod_of() != pod_of(port=9000)


def test_the_signature_changes_with_everything_that_is_wanted() -> None:
    def signature(**spec: Any) -> str:  # noqa: ANN401
        found: str = rendered(a_fleet(**spec))["StatefulSet/demo"]["metadata"]["annotations"][HASH]
        return found

    signatures = [signature(), signature(replicas=2), signature(port=9), signature(env=[{"name": "A", "value": "1"}])]
    assert len(set(signatures)) == 4
    assert signature() == signatures[0]


def test_the_budget_is_as_wanted() -> None:
    assert rendered(a_fleet())["PodDisruptionBudget/demo"]["spec"]["maxUnavailable"] == 1
    updated = rendered(a_fleet(update={"maxUnavailable": 2}))
    assert updated["PodDisruptionBudget/demo"]["spec"]["maxUnavailable"] == 2
    own = rendered(a_fleet(update={"maxUnavailable": 2}, disruptionBudget={"maxUnavailable": 3}))
    assert own["PodDisruptionBudget/demo"]["spec"]["maxUnavailable"] == 3


def test_a_pod_monitor_needs_a_cluster_that_knows_it() -> None:
    labels = {"release": "prometheus", "app.kubernetes.io/name": "own"}
    fleet = a_fleet(metrics={"podMonitor": True, "labels": labels})
    found = resolve(fleet.spec, AROUND)
    assert isinstance(found, Resolved)
    knows = replace(AROUND, pod_monitors=True)
    objects = {body["kind"]: body for body in render(fleet, found, knows)}
    monitor = objects["PodMonitor"]
    assert monitor["spec"]["selector"]["matchLabels"] == {FLEET_LABEL: "demo"}
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "http", "path": "/metrics"}]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["metadata"]["labels"]["app.kubernetes.io/name"] == "vllm-poc-worker"
    assert "PodMonitor" not in {body["kind"] for body in render(fleet, found, AROUND)}
    assert "PodMonitor" not in {body["kind"] for body in render(a_fleet(), found, knows)}


def test_a_pod_monitor_that_the_cluster_does_not_know_is_told() -> None:
    seen = FleetSnapshot(fleet=a_fleet(metrics={"podMonitor": True}), around=AROUND, now=NOW)
    degraded = plan(seen).status.own_conditions["Degraded"]
    assert (degraded.status, degraded.reason) == ("True", Reason.POD_MONITOR_UNKNOWN)
    known = replace(seen, around=replace(AROUND, pod_monitors=True))
    assert plan(known).status.own_conditions["Degraded"].status == "False"
