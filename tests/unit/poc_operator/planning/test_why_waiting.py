# SPDX-License-Identifier: Apache-2.0
"""What is told of a message of the kubelet. Those here are containerd's and CRI-O's, as kubelets pass them on."""

from typing import Any

import pytest

from poc_operator.observed import PodView
from poc_operator.planning.eligibility import why_waiting

_PULL = 'failed to pull and unpack image "ghcr.io/acme/vllm-poc:0.9": failed to resolve reference '
_RESOLVE = f'rpc error: code = Unknown desc = {_PULL}"ghcr.io/acme/vllm-poc:0.9": '
_TOKEN = "https://ghcr.io/token?scope=repository%3Aacme%2Fvllm-poc%3Apull&service=ghcr.io"  # noqa: S105
_BLOB = "https://user:pa55@cdn.example.org/blobs/1?Signature=abcdef&Expires=1"

TOLD: dict[str, tuple[str, str, str]] = {
    "not found": (
        "ErrImagePull",
        f"{_RESOLVE}ghcr.io/acme/vllm-poc:0.9: not found",
        'ErrImagePull: failed to resolve reference "ghcr.io/acme/vllm-poc:0.9": ghcr.io/acme/vllm-poc:0.9: not found',
    ),
    "unauthorized": (
        "ErrImagePull",
        f"{_RESOLVE}failed to authorize: failed to fetch anonymous token: unexpected status from GET request to "
        f"{_TOKEN}: 401 Unauthorized",
        "ErrImagePull: failed to fetch anonymous token: unexpected status from GET request to https://ghcr.io/token: "
        "401 Unauthorized",
    ),
    "no such host": (
        "ImagePullBackOff",
        f'Back-off pulling image "registry.example/vllm-poc": ErrImagePull: {_RESOLVE}failed to do request: Head '
        '"https://registry.example/v2/vllm-poc/manifests/latest": dial tcp: lookup registry.example on 10.96.0.10:53: '
        "no such host",
        "ImagePullBackOff: dial tcp: lookup registry.example on 10.96.0.10:53: no such host",
    ),
    "several lines": (
        "ErrImagePull",
        "initializing source docker://acme/vllm-poc: reading manifest latest in docker.io/acme/vllm-poc: errors:\n"
        "denied: requested access to the resource is denied\nunauthorized: authentication required\n",
        "ErrImagePull: errors: denied: requested access to the resource is denied unauthorized: "
        "authentication required",
    ),
    "secrets in an address": (
        "ErrImagePull",
        f'failed to copy: Get "{_BLOB}": dial tcp 192.0.2.1:443: i/o timeout',
        'ErrImagePull: failed to copy: Get "https://cdn.example.org/blobs/1": dial tcp 192.0.2.1:443: i/o timeout',
    ),
    "control characters": ("ErrImagePull", "denied: \x1b[2J\x07no", "ErrImagePull: denied: [2Jno"),
    "endless": ("ErrImagePull", "x" * 5000, f"ErrImagePull: {'x' * 119}…"),
    "a Secret": (
        "CreateContainerConfigError",
        'secret "hub" not found',
        'CreateContainerConfigError: secret "hub" not found',
    ),
    "nothing": ("ImagePullBackOff", "", "ImagePullBackOff"),
    "a crash, whose message changes with each": (
        "CrashLoopBackOff",
        "back-off 5m0s restarting failed container=vllm pod=demo-0_poc(1f0c)",
        "CrashLoopBackOff",
    ),
}


def waiting(reason: str, message: str, **status: Any) -> PodView:  # noqa: ANN401 - the API server's JSON
    told = {"reason": reason, **({"message": message} if message else {})}
    beside = {"name": "proxy", "state": {"waiting": {"reason": "ContainerCreating"}}}
    containers = [beside, {"name": "vllm", "state": {"waiting": told}}]
    metadata = {"name": "demo-0", "namespace": "poc", "uid": "u"}
    return PodView.parse({"metadata": metadata, "status": {"containerStatuses": containers, **status}})


@pytest.mark.parametrize(("reason", "message", "says"), TOLD.values(), ids=TOLD)
def test_the_cause_is_told_in_few_words(reason: str, message: str, says: str) -> None:
    assert why_waiting(waiting(reason, message)) == says


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("https://user:pa/ss@reg.example/token", "https://reg.example/token"),
        ("socks5://bob:hunter2@proxy:1080", "socks5://proxy:1080"),
        ("HTTPS://bob:hunter2@proxy", "HTTPS://proxy"),
        ("https://bob:hun ter2@proxy", "https://proxy"),
        ("https://bob:hun?ter2@proxy", "https://…"),
        ("https://cdn.example/x?X-Amz-Signature=a'SECRET", "https://cdn.example/x"),
        ("https://reg.example/v2#access_token=zz", "https://reg.example/v2"),
        ("https://reg.example/v2?a=b;Authorization: Bearer eyJh", "https://reg.example/v2"),
        ("docker://acme/vllm@sha256:0a1b", "docker://acme/vllm@sha256:0a1b"),
        ('https://u:p\\"q@host/v2/', "https://host/v2/"),
    ],
)
def test_no_secret_of_an_address_is_told(address: str, says: str) -> None:
    told = why_waiting(waiting("ErrImagePull", f'Get "{address}": no route to host'))
    assert told == f'ErrImagePull: Get "{says}": no route to host'


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("refused: Authorization: Bearer eyJh.bGci: expired", "refused: Authorization: Bearer … expired"),
        ("Authorization: token ghp_x refused", "Authorization: token … refused"),
        ("Basic dXNlcjpwYXNzd29yZDE= refused", "Basic … refused"),
        ("no basic auth credentials", "no basic auth credentials"),
        ("Bearer token expired", "Bearer token expired"),
        ("Basic authentication required", "Basic authentication required"),
    ],
)
def test_no_credentials_are_told_and_words_about_them_stay(message: str, says: str) -> None:
    assert why_waiting(waiting("ErrImagePull", message)) == f"ErrImagePull: {says}"


def test_what_init_containers_say_counts_first() -> None:
    refused = {"name": "init", "state": {"waiting": {"reason": "ErrImagePull", "message": "init: not found"}}}
    pod = waiting("PodInitializing", "", initContainerStatuses=[refused])
    assert why_waiting(pod) == "ErrImagePull: init: not found"


def test_a_scheduler_has_no_other_words() -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    found = PodView.parse(
        {"metadata": {"name": "a", "namespace": "b", "uid": "c"}, "status": {"conditions": [scheduled]}}
    )
    assert why_waiting(found) == "0/1 nodes are available"
