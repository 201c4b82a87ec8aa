# SPDX-License-Identifier: Apache-2.0
"""Strategic merge patches of pods' templates, and whether an object has all that is wanted."""

from typing import Any

import pytest

from poc_operator.fleets.merge import PatchError, covers, merged

POD: dict[str, Any] = {
    "terminationGracePeriodSeconds": 60,
    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [{"name": "vllm", "image": "a", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}],
    "volumes": [{"name": "cache", "emptyDir": {}}],
}


@pytest.mark.parametrize(
    ("patch", "path", "wanted"),
    [
        ({"tolerations": [{"operator": "Exists"}]}, ("tolerations",), [{"operator": "Exists"}]),
        ({"securityContext": {"runAsUser": 1}}, ("securityContext", "seccompProfile", "type"), "RuntimeDefault"),
        ({"securityContext": None}, ("securityContext",), None),
        ({"securityContext": {"$patch": "replace", "runAsUser": 1}}, ("securityContext",), {"runAsUser": 1}),
        ({"containers": [{"name": "vllm", "image": "b"}]}, ("containers", 0, "image"), "b"),
        (
            {"containers": [{"name": "vllm", "env": [{"name": "A", "value": "3"}]}]},
            ("containers", 0, "env"),
            [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}],
        ),
        (
            {"containers": [{"name": "vllm", "env": [{"name": "A", "$patch": "delete"}]}]},
            ("containers", 0, "env"),
            [{"name": "B", "value": "2"}],
        ),
        ({"containers": [{"name": "more", "image": "c"}]}, ("containers", 1, "name"), "more"),
        (
            {"volumes": [{"name": "cache", "emptyDir": None, "hostPath": {"path": "/w"}}]},
            ("volumes", 0),
            {"name": "cache", "hostPath": {"path": "/w"}},
        ),
    ],
)
def test_a_patch_is_merged_as_kubernetes_does(patch: dict[str, Any], path: tuple[Any, ...], wanted: object) -> None:
    found: Any = merged(POD, patch, "spec")
    for key in path:
        found = found.get(key) if isinstance(found, dict) else found[key]
    assert found == wanted


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ({"containers": "text"}, "spec.containers must be a list, not 'text'"),
        ({"containers": {"name": "vllm"}}, "spec.containers must be a list"),
        ({"containers": [{}]}, r"spec.containers[0] must have a name"),
        ({"containers": [1]}, "spec.containers[0] must be an object, not 1"),
        ({"volumes": [{"name": {}}]}, "spec.volumes[0] must have a name"),
        ({"securityContext": 1}, "spec.securityContext must be an object, not 1"),
        ({"securityContext": {"$patch": "merge"}}, 'spec.securityContext.$patch must be "replace"'),
    ],
)
def test_a_patch_that_does_not_fit_names_its_field(patch: dict[str, Any], says: str) -> None:
    with pytest.raises(PatchError) as error:
        merged(POD, patch, "spec")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("found", "enough"),
    [
        (POD, True),
        ({**POD, "dnsPolicy": "ClusterFirst"}, True),
        ({**POD, "terminationGracePeriodSeconds": 30}, False),
        ({key: value for key, value in POD.items() if key != "volumes"}, False),
        ({**POD, "containers": [*POD["containers"], {"name": "injected"}]}, True),
        ({**POD, "containers": [{**POD["containers"][0], "env": []}]}, False),
        ({**POD, "volumes": [{"name": "injected"}, *POD["volumes"]]}, True),
        ({**POD, "volumes": "text"}, False),
    ],
)
def test_what_is_there_beside_what_is_wanted_does_not_matter(found: dict[str, Any], enough: bool) -> None:
    assert covers(found, POD) is enough


def test_lists_without_keys_are_compared_as_a_whole() -> None:
    assert covers({"args": ["a", "b"]}, {"args": ["a", "b"]})
    assert not covers({"args": ["a", "b", "c"]}, {"args": ["a", "b"]})
