# SPDX-License-Identifier: Apache-2.0
"""What is left when a namespace or the operator goes: nothing that hangs, and no pod that computes for nobody."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hack.deploy.kube import Kube
from hack.deploy.local import OPERATOR_CHART, operator_values
from hack.deploy.releases import NAMESPACE, OPERATOR, RESTRICTED, SYSTEM_NAMESPACE
from hack.toolchain.common import UserError, run, wait_until
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import SlotState
from tests.cluster import stand_in
from tests.cluster.objects import ARTIFACT, Rounds, is_running
from tests.cluster.pods import statuses
from tests.support.fakes.receiver import Receiver
from tests.support.servers.cluster import diagnosis, ready
from vllm_poc.wire.answers import PowState

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480, func_only=True)]

RELEASE = "other"
OWN = "poc-other-system"
#: Namespaces in which the release has nothing but Roles.
WATCHED = ("poc-roles-a", "poc-roles-b")
SECONDS = 90.0
STAND_IN = {"poc-test": "stand-in"}
#: Seconds for which a deleted stand-in lives.
GRACE_SECONDS = 20


@contextmanager
def release(kube: Kube, **values: object) -> Iterator[Callable[[], None]]:
    """Install the operator once more, in place of the demo's, which stands still meanwhile. Yields what uninstalls."""
    scale(kube, 0)
    try:
        kube.ensure_namespace(OWN, RESTRICTED)
        images = {"image": operator_values(NAMESPACE)["image"]}
        less = {"crds": {"enabled": False}, "gateway": {"enabled": False}, "rbac": {"aggregate": False}}
        kube.helm_install(RELEASE, OPERATOR_CHART, OWN, {**images, **less, **values})
        kube.kubectl(
            "-n", OWN, "rollout", "status", f"deployment/{deployment()}", f"--timeout={SECONDS:.0f}s", limit=100
        )
        yield lambda: helm_uninstall(kube)
    finally:
        helm_uninstall(kube, "--ignore-not-found", "--no-hooks")
        kube.kubectl("delete", "namespace", OWN, "--ignore-not-found", limit=120)
        scale(kube, 1)
        ready(kube)


def deployment() -> str:
    return f"{RELEASE}-{OPERATOR}"


def helm_uninstall(kube: Kube, *flags: str) -> None:
    """``helm uninstall``, which runs the hooks."""
    argv: list[str | Path] = [kube.helm_path, "uninstall", RELEASE, "--namespace", OWN, *flags]
    run(argv, limit=200, env=kube.environment)


def scale(kube: Kube, replicas: int) -> None:
    """Let the demo's operator stand still, or go on."""
    kube.kubectl("-n", SYSTEM_NAMESPACE, "scale", "deployment", OPERATOR, f"--replicas={replicas}")
    selector = f"app.kubernetes.io/name={OPERATOR},app.kubernetes.io/instance={OPERATOR}"
    assert wait_until(
        lambda: len(kube.get("-n", SYSTEM_NAMESPACE, "pods", "-l", selector)["items"]) == replicas, SECONDS
    )


def restarts(kube: Kube) -> int:
    """How often the operator of the release was restarted."""
    pods = kube.get("-n", OWN, "pods", "-l", f"app.kubernetes.io/instance={RELEASE}")["items"]
    return int(pods[0]["status"]["containerStatuses"][0]["restartCount"])


def is_gone(kube: Kube, namespace: str) -> bool:
    """Whether there is no such namespace any more."""
    return not kube.kubectl("get", "namespace", namespace, "--ignore-not-found").strip()


def make_pod(kube: Kube, namespace: str, name: str, receiver: Receiver, *options: str) -> None:
    """Make a pod that computes for rounds, or only seems to; see `stand_in`."""
    image = operator_values(NAMESPACE)["image"]
    container = {
        "name": "vllm",
        "image": f"{image['repository']}:{image['tag']}",
        "imagePullPolicy": image["pullPolicy"],
        "command": ["python3", "-c", Path(stand_in.__file__).read_text(), name, receiver.url, *options],
        "ports": [{"containerPort": stand_in.PORT}],
        "readinessProbe": {"tcpSocket": {"port": stand_in.PORT}, "periodSeconds": 1},
    }
    metadata = {"name": name, "namespace": namespace, "labels": STAND_IN}
    spec = {"containers": [container], "terminationGracePeriodSeconds": GRACE_SECONDS}
    kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    kube.kubectl("-n", namespace, "wait", "pod", name, "--for=condition=Ready", f"--timeout={SECONDS:.0f}s", limit=100)


def all_work(round_: PoCRound) -> bool:
    """Whether both stand-ins have taken their slots."""
    return [slot.state for slot in round_.status.assignments] == [SlotState.RUNNING] * 2


@pytest.fixture
def watched(kube: Kube) -> Iterator[tuple[str, ...]]:
    """Namespaces without any pod."""
    for namespace in WATCHED:
        kube.ensure_namespace(namespace, {})
    yield WATCHED
    for namespace in WATCHED:
        kube.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout=60s", limit=70)


@pytest.mark.long
def test_a_namespace_with_roles_alone_can_be_deleted(kube: Kube, watched: tuple[str, ...], receiver: Receiver) -> None:
    """The operator's rights go with the namespace, but after its pods: who answers is told to stop, and nobody is
    waited for. Its other namespaces go on.
    """
    first, second = watched
    with release(kube, watchNamespaces=list(watched)):
        make_pod(kube, first, "answers", receiver)
        make_pod(kube, first, "silent", receiver, stand_in.SILENT)
        Rounds(kube, first).apply("runs", **ARTIFACT, selector={"matchLabels": STAND_IN})
        Rounds(kube, first).apply("waits", selector={"matchLabels": {"poc-test": "nobody"}})
        Rounds(kube, first).wait_until("runs", all_work)
        assert wait_until(lambda: Rounds(kube, first).get("waits").status.message != "", SECONDS)
        assert receiver.bodies == []
        kube.kubectl("delete", "namespace", first, "--wait=false")
        assert receiver.wait_for(1, GRACE_SECONDS), diagnosis(kube)
        assert wait_until(lambda: is_gone(kube, first), SECONDS), diagnosis(kube)
        assert {body["stopped"] for body in receiver.bodies} == {"answers"}
        Rounds(kube, second).apply("waits")
        assert wait_until(lambda: Rounds(kube, second).get("waits").status.message != "", SECONDS)
        # Longer than kopf tries by itself.
        assert not wait_until(lambda: restarts(kube) > 0, 20)


@pytest.mark.parametrize("watch", [[], [NAMESPACE]], ids=["cluster", "roles"])
def test_an_operator_that_is_uninstalled_leaves_no_pod_at_work(
    kube: Kube, rounds: Rounds, receiver: Receiver, watch: list[str]
) -> None:
    with release(kube, watchNamespaces=watch) as uninstall:
        rounds.apply("left", **ARTIFACT, callbackURL=receiver.url)
        rounds.wait_until("left", is_running)
        uninstall()
        assert {status.state for status in statuses(kube)} == {PowState.STOPPED}
        left = rounds.get("left")
        assert (left.status.state, left.spec.suspend) == ("Suspended", True)
        hooks = ("serviceaccount,job,role,rolebinding", "-n", OWN)
        assert not kube.kubectl("get", *hooks, "-l", f"app.kubernetes.io/name={OPERATOR}-uninstall", "-o", "name")
        rounds.delete("left")  # nothing holds it
    with pytest.raises(UserError, match="NotFound"):
        rounds.get("left")
