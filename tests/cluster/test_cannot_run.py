# SPDX-License-Identifier: Apache-2.0
"""Rounds that are well-formed but cannot run say why, and what to do."""

from collections.abc import Iterator

import pytest

from hack.deploy.kube import Kube
from tests.cluster.objects import Rounds

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

NAMESPACE = "poc-test"
NO_IMAGE = "localhost/no-such-image:1"
STUCK = {"poc-test-pod": "stuck"}


@pytest.fixture
def elsewhere(kube: Kube) -> Iterator[Rounds]:
    """Rounds in a namespace without vLLM pods."""
    kube.ensure_namespace(NAMESPACE, {})
    with Rounds(kube, NAMESPACE) as own:
        yield own


@pytest.fixture
def stuck_pod(kube: Kube) -> Iterator[str]:
    """A pod whose image is nowhere."""
    kube.ensure_namespace(NAMESPACE, {})
    container = {"name": "vllm", "image": NO_IMAGE, "imagePullPolicy": "Never"}
    metadata = {"name": "stuck", "namespace": NAMESPACE, "labels": STUCK}
    kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}})
    yield "stuck"
    kube.kubectl("--namespace", NAMESPACE, "delete", "pod", "stuck", "--grace-period=1")


#: spec, reason, what the message says
UNFIT = {
    "another model": (
        {"model": {"name": "other/model", "seqLen": 64}},
        "ModelMismatch",
        'spec.model.name is "other/model" but the pod serves "/models/qwen3-tiny", "demo": '
        "create a new one with the served name",
    ),
    "sequence": (
        {"model": {"name": "demo", "seqLen": 1025}},
        "SequenceTooLong",
        "spec.model.seqLen is 1025 but the pod allows 1024: create a new one with a smaller seqLen",
    ),
    "k_dim": (
        {"rTarget": None, "artifact": {"kDim": 129}},
        "KDimTooLarge",
        "spec.artifact.kDim is 129 but the model's hidden size is 128: create a new one with a smaller kDim",
    ),
}


@pytest.mark.parametrize(("spec", "reason", "says"), UNFIT.values(), ids=UNFIT)
def test_no_pod_can_run_the_round(rounds: Rounds, spec: dict[str, object], reason: str, says: str) -> None:
    rounds.apply("unfit", **spec)
    assert says in rounds.wait_for_reason("unfit", "Progressing", reason)
    assert says in rounds.wait_for_reason("unfit", "Accepted", reason)
    rounds.wait("unfit", "condition=Accepted=False")


def test_no_pod_answers_on_the_port(rounds: Rounds) -> None:
    rounds.apply("wrong-port", port=8001)
    message = rounds.wait_for_reason("wrong-port", "Progressing", "PodsUnreachable")
    assert message.startswith("no pod answers the operator on port 8001: demo-0")
    assert message.endswith("that vLLM runs with --enable-poc, and that pods have the operator's token")


def test_no_pod_matches(elsewhere: Rounds) -> None:
    elsewhere.apply("lonely")
    message = elsewhere.wait_for_reason("lonely", "Progressing", "NoMatchingPods")
    assert message == (
        'no pod in namespace "poc-test" matches poc.gonka.ai/worker=true: '
        "create a PoCFleet there, or label your vLLM pods"
    )


def test_no_pod_is_ready(elsewhere: Rounds, stuck_pod: str) -> None:
    elsewhere.apply("waiting", selector={"matchLabels": STUCK})
    elsewhere.wait_for_reason("waiting", "Progressing", "NoPodReady")
    why = f'ErrImageNeverPull: Container image "{NO_IMAGE}" is not present with pull policy of Never'
    says = f"waiting for the pod to become ready: {stuck_pod} ({why})"
    elsewhere.wait_until("waiting", lambda found: found.status.message == says)


def test_a_round_that_nobody_starts_fails_and_says_what_it_waited_for(elsewhere: Rounds) -> None:
    elsewhere.apply("too-late", startDeadlineSeconds=8)  # long enough to be planned once on a busy machine
    elsewhere.wait("too-late", "condition=Failed", seconds=30)
    message = elsewhere.wait_for_reason("too-late", "Failed", "StartDeadlineExceeded")
    assert message.startswith("no pod started within 8 s (spec.startDeadlineSeconds); last waited for: no pod in")
    assert elsewhere.get("too-late").status.state == "Failed"
