# SPDX-License-Identifier: Apache-2.0
"""The API server refuses a wrong fleet at once, naming the field and the remedy, and changes that no PVC can follow."""

from typing import Any

import pytest

from tests.support.servers.api_server import ApiServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

PATH = {"model": {"path": "org/model"}}
PRESET = {"model": {"preset": "minimax-m2.7"}}
OWN_FLAG = "fields of the spec stand for them"

#: What is wrong: (spec, what the message says).
WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no model": ({"model": {}}, ("spec.model", "set exactly one of preset and path")),
    "two models": ({"model": {"preset": "a", "path": "b"}}, ("spec.model", "set exactly one of preset and path")),
    "a path with a space": ({"model": {"path": "a b"}}, ("spec.model.path", "must be a hub id or a path")),
    "a flag as path": ({"model": {"path": "--help"}}, ("spec.model.path", "must be a hub id or a path")),
    "parallelism of a preset": (
        {**PRESET, "parallelism": {"tensor": 2}},
        ("spec.parallelism", "parallelism needs model.path: a preset sets its own"),
    ),
    "a GPU's product without a number": (
        {**PATH, "gpu": {"product": "NVIDIA-H200"}},
        ("spec.gpu", "gpu.product needs gpu.count with model.path, or pods get no GPU: set gpu.count"),
    ),
    "ranks without GPUs": (
        {**PATH, "parallelism": {"tensor": 2}, "gpu": {"count": 4}},
        ("spec.parallelism", "parallelism.tensor * parallelism.pipeline must be gpu.count"),
    ),
    "ranks without Kubernetes nodes": (
        {**PATH, "parallelism": {"tensor": 8, "kubernetesNodes": 2}, "gpu": {"count": 8}},
        ("spec.parallelism", "must be gpu.count (1 if it is not set) * parallelism.kubernetesNodes"),
    ),
    "a volume of one Kubernetes node for several": (
        {
            **PATH,
            "parallelism": {"pipeline": 2, "kubernetesNodes": 2},
            "cache": {"size": "1Gi", "accessMode": "ReadWriteOnce"},
        },
        ("spec.cache.accessMode", "must be ReadWriteMany"),
    ),
    "Kubernetes nodes by flag": ({**PATH, "engineArgs": ["--nnodes=2"]}, ("spec.engineArgs", OWN_FLAG)),
    "a port by flag": ({**PATH, "engineArgs": ["--port=1"]}, ("spec.engineArgs", OWN_FLAG)),
    "a port by another spelling": ({**PATH, "engineArgs": ["--tensor_parallel_size=2"]}, ("spec.engineArgs", OWN_FLAG)),
    "a port by the begin of its flag": ({**PATH, "engineArgs": ["--por=1"]}, ("spec.engineArgs", OWN_FLAG)),
    "a flag of two lines": ({**PATH, "engineArgs": ["--a\n"]}, ("spec.engineArgs[0]", "line breaks")),
    "the token by variable": (
        {**PATH, "env": [{"name": "VLLM_POC_TOKEN", "value": "a"}]},
        ("spec.env[0].name", "use auth, callbackAllow, huggingFace.tokenSecret and decode"),
    ),
    "a variable without a value": ({**PATH, "env": [{"name": "A"}]}, ("spec.env[0]", "set exactly one of value")),
    "a variable twice": (
        {**PATH, "env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        ("spec.env[1]", "Duplicate value"),
    ),
    "two caches": (
        {**PATH, "cache": {"existingClaim": "a", "size": "1Gi"}},
        ("spec.cache", "at most one of"),
    ),
    "a class without a size": ({**PATH, "cache": {"storageClass": "a"}}, ("spec.cache", "need size: set it")),
    "a size in bytes": ({**PATH, "cache": {"size": "1000"}}, ("spec.cache.size", 'for example "400Gi"')),
    "chains by variable": (
        {**PATH, "env": [{"name": "VLLM_POC_DECODE_RESERVE_BYTES", "value": "1"}]},
        ("spec.env[0].name", "huggingFace.tokenSecret and decode"),
    ),
    "chains without a codebook": (
        {**PRESET, "decode": {}},
        ("spec.decode", "set exactly one of codebook (the network's file) and rebuildCodebook"),
    ),
    "two codebooks": (
        {**PRESET, "decode": {"codebook": {"configMap": "a", "path": "/a"}}},
        ("spec.decode.codebook", "set exactly one of configMap and path"),
    ),
    "a codebook beside the container's root": (
        {**PRESET, "decode": {"codebook": {"path": "a"}}},
        ("spec.decode.codebook.path", "must be an absolute path"),
    ),
    "chains without memory": (
        {**PATH, "decode": {"rebuildCodebook": True}},
        ("spec.decode", "decode.reserve is needed with model.path"),
    ),
    "memory for chains in bytes": (
        {**PRESET, "decode": {"rebuildCodebook": True, "reserve": "5000"}},
        ("spec.decode.reserve", 'as "5Gi"'),
    ),
    "chains in a pipeline": (
        {
            **PATH,
            "gpu": {"count": 2},
            "parallelism": {"pipeline": 2},
            "decode": {"rebuildCodebook": True, "reserve": "5Gi"},
        },
        ("spec.decode", "does not run in a pipeline"),
    ),
    "open without receivers": (
        {**PATH, "auth": {"open": True}},
        ("spec.callbackAllow", "open needs callbackAllow"),
    ),
    "GPUs as a resource": (
        {**PATH, "resources": {"limits": {"nvidia.com/gpu": "1"}}},
        ("spec.resources.limits", "set gpu.count instead"),
    ),
    "memory in words": (
        {**PATH, "resources": {"limits": {"memory": "much"}}},
        ("memory", "a quantity in quotes"),
    ),
    "too many replicas": ({**PATH, "replicas": 257}, ("spec.replicas", "less than or equal to 256")),
    "the fleet's label": (
        {**PATH, "podTemplate": {"metadata": {"labels": {"poc.gonka.ai/fleet": "other"}}}},
        ("spec.podTemplate.metadata.labels", "by which the fleet finds what is its own"),
    ),
    "a typo": ({**PATH, "replica": 2}, ('unknown field "spec.replica"',)),
}

#: Changes of a PVC of 400Gi: (the cache afterwards, what the message says; nothing if it is accepted).
CHANGES: dict[str, tuple[dict[str, Any] | None, str]] = {
    "larger": ({"size": "1Ti"}, ""),
    "smaller": ({"size": "399Gi"}, "a PVC cannot shrink"),
    "another class": ({"storageClass": "other"}, "storageClass and accessMode of a PVC cannot be changed"),
    "another mode": ({"accessMode": "ReadWriteOnce"}, "storageClass and accessMode of a PVC cannot be changed"),
    "no class": ({"storageClass": None}, "storageClass and accessMode of a PVC cannot be changed"),
    "a PVC of the user": ({"size": None, "storageClass": None, "existingClaim": "own"}, ""),
    "none": (None, ""),
}


@pytest.mark.parametrize(("spec", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_fleet_is_refused(api: ApiServer, spec: dict[str, Any], says: tuple[str, ...]) -> None:
    status, answer = api.create("PoCFleet", "trial", spec, dry_run=True)
    assert status in {400, 422}
    for words in says:
        assert words in answer["message"]


@pytest.mark.parametrize("name", ["a.b", "1a", "a" * 41])
def test_a_name_that_no_service_can_have_is_refused(api: ApiServer, name: str) -> None:
    status, answer = api.create("PoCFleet", name, PATH, dry_run=True)
    assert status == 422
    assert "the name must have at most 40 lower-case letters" in answer["message"]
    assert api.create("PoCFleet", "a" * 40, PATH, dry_run=True)[0] == 201


@pytest.mark.parametrize(("cache", "says"), CHANGES.values(), ids=CHANGES)
def test_a_cache_changes_as_a_pvc_can(api: ApiServer, cache: dict[str, Any] | None, says: str) -> None:
    name = f"cache-{abs(hash(str(cache))) % 10**8}"
    assert api.create("PoCFleet", name, {**PATH, "cache": {"size": "400Gi", "storageClass": "nfs"}})[0] == 201
    status, answer = api.patch("PoCFleet", name, {"cache": cache})
    assert (status == 200) == (not says), answer
    assert says in answer.get("message", "")


def test_everything_else_may_be_changed(api: ApiServer) -> None:
    assert api.create("PoCFleet", "changed", {**PATH, "replicas": 2, "gpu": {"count": 2}})[0] == 201
    for change in ({"model": {"path": "org/other"}}, {"gpu": {"count": 4}}, {"port": 9}, {"auth": {"open": False}}):
        status, answer = api.patch("PoCFleet", "changed", change)
        assert status == 200, answer


def test_kubernetes_nodes_of_a_replica_stay_as_they_are(api: ApiServer) -> None:
    span = {"parallelism": {"pipeline": 2, "kubernetesNodes": 2}}
    assert api.create("PoCFleet", "one-node", PATH)[0] == 201
    assert api.create("PoCFleet", "two-nodes", {**PATH, **span})[0] == 201
    assert api.patch("PoCFleet", "two-nodes", {"replicas": 3})[0] == 200
    for name, change in (("one-node", span), ("two-nodes", {"parallelism": None})):
        status, answer = api.patch("PoCFleet", name, change)
        assert status == 422
        assert "parallelism.kubernetesNodes cannot be changed: make another fleet" in answer["message"]


def test_work_takes_pods_of_a_fleet_or_by_labels(api: ApiServer) -> None:
    spec = {
        "blockHash": "5f" * 32,
        "blockHeight": 1,
        "publicKey": "02a1",
        "model": {"name": "demo", "seqLen": 64},
        "nodes": {"first": 0, "last": 0, "count": 1},
        "rTarget": "1.4",
        "fleetRef": {"name": "demo"},
    }
    assert api.create("PoCRound", "trial", spec, dry_run=True)[0] == 201
    for more, says in (
        ({"selector": {"matchLabels": {"a": "b"}}}, "set at most one of fleetRef and selector"),
        ({"port": 9000}, "port is that of the fleet: remove port, or fleetRef"),
    ):
        status, answer = api.create("PoCRound", "trial", {**spec, **more}, dry_run=True)
        assert status == 422
        assert says in answer["message"]
