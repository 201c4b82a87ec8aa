# SPDX-License-Identifier: Apache-2.0
"""The vLLM pods: who they are, what they say, what they compute when asked directly."""

import json
import urllib.request
from typing import Any

import pytest

from hack.deploy.kube import Kube
from hack.deploy.releases import NAMESPACE, PODS
from hack.toolchain.common import wait_until
from poc_operator.observed import PodView
from tests.support.servers.cluster import diagnosis
from vllm_poc.wire.answers import StatusResponse
from vllm_poc.wire.generate import GeneratedResponse
from vllm_poc.wire.messages import API_PREFIX

REQUEST_SECONDS = 60.0
#: A pod that is deleted has 60 s to end; its replacement loads vLLM beside another pod that computes.
REPLACED_SECONDS = 300.0


def ready_pods(kube: Kube) -> list[PodView]:
    """Return the vLLM pods that are ready and not on their way out, by name."""
    found = kube.get("--namespace", NAMESPACE, "pods", "--selector", "poc.gonka.ai/worker=true")
    pods = [PodView.parse(body) for body in found["items"]]
    return sorted((pod for pod in pods if pod.ready and pod.stays), key=lambda pod: pod.name)


def status_of(pod: PodView) -> StatusResponse:
    """Return what the pod says."""
    with urllib.request.urlopen(f"{_base(pod)}/status", timeout=REQUEST_SECONDS) as answer:  # noqa: S310
        return StatusResponse.model_validate_json(answer.read())


def statuses(kube: Kube) -> list[StatusResponse]:
    """Return what all vLLM pods say."""
    return [status_of(pod) for pod in ready_pods(kube)]


def generate(pod: PodView, spec: dict[str, Any], nonces: list[int]) -> GeneratedResponse:
    """Let the pod compute nonces of a round with this spec."""
    model, artifact = spec["model"], spec.get("artifact")
    body: dict[str, Any] = {
        "block_hash": spec["blockHash"],
        "block_height": spec["blockHeight"],
        "public_key": spec["publicKey"],
        "batch_size": spec["batchSize"],
        "nonces": nonces,
        "wait": True,
    }
    if artifact:
        params = {"model": model["name"], "seq_len": model["seqLen"], "k_dim": artifact["kDim"]}
        body |= {"params": params, "poc_stronger_rng": model.get("strongRng", False)}
    else:
        body |= {"r_target": float(spec["rTarget"]), "seq_len": model["seqLen"]}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{_base(pod)}/generate", json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:  # noqa: S310
        return GeneratedResponse.model_validate_json(answer.read())


def replace(kube: Kube, pod: PodView) -> None:
    """Delete a pod; the fleet makes another one when it is gone."""
    kube.kubectl("--namespace", NAMESPACE, "delete", "pod", pod.name, "--wait=false")


def wait_for_replacement(kube: Kube, before: list[PodView]) -> PodView:
    """Wait until all vLLM pods are ready again; return the one that was not there before."""
    known = {pod.uid for pod in before}
    new: list[PodView] = []

    def look() -> bool:
        pods = ready_pods(kube)
        new[:] = [pod for pod in pods if pod.uid not in known]
        return len(pods) == PODS and len(new) == 1

    if not wait_until(look, REPLACED_SECONDS, pause=1):
        pytest.fail(f"no new pod is ready after {REPLACED_SECONDS:.0f} s\n{diagnosis(kube)}")
    return new[0]


def _base(pod: PodView) -> str:
    return f"http://{pod.ip}:8000{API_PREFIX}"
