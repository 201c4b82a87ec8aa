# SPDX-License-Identifier: Apache-2.0
"""Faults that are injected into the cluster: ``kubectl poc explain`` or ``check`` names cause and remedy.

All twelve of them are injected. Pods whose engine has the fault are simulated, since there is no GPU. The cluster's
network heeds no NetworkPolicy, so packets to a pod are dropped by that pod itself. The certificate that has expired is
a gateway's: that of a receiver, and further faces of these faults, stand in
``tests/unit/poc_operator/cli/test_faults.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.layout import HOST_ADDRESS, Port, admin_kubeconfig
from hack.deploy.kube import Kube
from hack.deploy.releases import GATEWAY, SYSTEM_NAMESPACE
from hack.toolchain.common import wait_until
from tests.cluster import faulty, simulated_pod
from tests.cluster.conftest import Plugin
from tests.cluster.faulty import LABEL, MISSING_CLAIM, NAMESPACE, dropping_pod, fleet, simulated_pod_of
from tests.cluster.objects import ARTIFACT, Rounds
from tests.cluster.simulated_pod import MODEL, SICK, Ill
from tests.support.patience import PATIENCE
from tests.support.servers.http_server import free_port
from tests.support.servers.slow_way import slow_way

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240, func_only=True)]

SECONDS = 120.0
#: Nobody listens there.
AWAY = f"http://{HOST_ADDRESS}:{free_port()}"
#: So late each connection to the slow API server begins.
LATE = 2.5
CHECK = ("check",)
REMEDY = "What to do: "


def explain(name: str, *options: str) -> tuple[str, ...]:
    return ("explain", "-n", NAMESPACE, name, *options)


@dataclass(frozen=True)
class Fault:
    """What ``kubectl poc`` is asked, and what its answer has: the cause, and next to it what to do."""

    asked: tuple[str, ...]
    cause: str
    remedy: str


FAULTS = {
    "wrong token": Fault(
        explain("refused"),
        "refused (HTTP 401, Unauthorized: send the token of VLLM_POC_TOKEN",
        "restart them after a change",
    ),
    "full disk": Fault(CHECK, f"gateway {NAMESPACE}/{faulty.GATEWAY} disk: it is full", "enlarge its volume"),
    "receiver away": Fault(
        explain("undelivered", "--gateway", f"{SYSTEM_NAMESPACE}/{GATEWAY}"),
        f"The receiver {AWAY} does not take results: Cannot connect to host",
        "Look whether the receiver runs at this address",
    ),
    "sick GPU vectors": Fault(
        explain("fleet/sick"), f"sick-{SICK} (32 of 32 nonces differ", "Compare their fingerprints"
    ),
    "hung engine": Fault(explain("hung"), "1 slot gets nothing done, the first: pod hung ", "Look at that pod's log"),
    "crash loop": Fault(explain("fleet/crashing"), faulty.CRASH, "at the pod's log"),
    "poison round": Fault(
        explain("poisonous"), "1 slot was given up, the first: pod poisonous ", "Find out why pods restart"
    ),
    "missing PVC": Fault(
        explain("fleet/claimless"),
        f'persistentvolumeclaim "{MISSING_CLAIM}" not found',
        "create that, or correct `spec.cache.existingClaim`",
    ),
    "missing PVC, as check tells": Fault(
        CHECK, f"PVC {NAMESPACE}/{MISSING_CLAIM}: the fleet claimless names it, and it does not exist", "create it"
    ),
    "wrong model name": Fault(explain("misnamed"), '"tinny" but the pod serves', "with a served name"),
    "network policy in the way": Fault(explain("unheard"), "unheard (no answer within 5 s)", "network policies"),
    "expired certificate": Fault(
        CHECK,
        f"gateway {NAMESPACE}/{faulty.GATEWAY} certificate: it has expired at 2020-01-02",
        "renew the Secret of gateway.tls.existingSecret",
    ),
}


@pytest.fixture(scope="module")
def injected(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All faults beside each other, but for the slow API server."""
    remove(kube)
    kube.ensure_namespace(NAMESPACE, {})
    inject(kube, tmp_path_factory.mktemp("certificate"))
    make_rounds(kube)
    yield
    remove(kube)


def inject(kube: Kube, folder: Path) -> None:
    """Make a gateway, fleets and pods that have a fault each. That of some pods shows once they compute."""
    crash = ["-c", f"raise SystemExit({faulty.CRASH!r})"]
    sick = ["-m", simulated_pod.__name__, Ill.IS_SICK]
    faulty.apply(
        kube,
        *faulty.gateway(folder),
        fleet("sick", sick, replicas=3, selfCheck={"enabled": True}),
        fleet("crashing", crash),
        fleet("claimless", crash, cache={"existingClaim": MISSING_CLAIM}),
        simulated_pod_of("well", Ill.NOTHING),
        simulated_pod_of("refused", Ill.NOTHING, token=faulty.OTHER_TOKEN),
        simulated_pod_of("hung", Ill.HANGS),
        simulated_pod_of("poisonous", Ill.DIES),
        dropping_pod("unheard"),
    )


def make_rounds(kube: Kube) -> None:
    """Make a round for each pod."""
    rounds = Rounds(kube, NAMESPACE)

    def apply(name: str, pod: str, **spec: Any) -> None:  # noqa: ANN401
        model = {"name": MODEL, "seqLen": 64}
        rounds.apply(name, **{**ARTIFACT, "model": model, "selector": {"matchLabels": {LABEL: pod}}, **spec})

    apply("undelivered", "well", callbackURL=AWAY, stop={"afterNonces": 64})
    apply("unharmed", "well", stop={"afterNonces": 64})
    apply("misnamed", "well", model={"name": "tinny", "seqLen": 64})
    apply("hung", "hung", stall={"afterSeconds": 10})
    apply("poisonous", "poisonous", retry={"backoffLimitPerSlot": 1})
    for name in ("refused", "unheard"):
        apply(name, name)


def remove(kube: Kube) -> None:
    kube.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", limit=PATIENCE * SECONDS)


def ask_until(plugin: Plugin, asked: tuple[str, ...], words: str) -> str:
    """Ask until the answer has the words; return it, or the last one without them."""
    said = [""]

    def look() -> bool:
        said[0] = plugin(*asked, fails=None)
        return words in said[0]

    wait_until(look, PATIENCE * SECONDS, pause=1)
    return said[0]


@pytest.mark.usefixtures("injected")
@pytest.mark.parametrize("name", FAULTS)
def test_cause_and_remedy_are_named(plugin: Plugin, name: str) -> None:
    fault = FAULTS[name]
    said = ask_until(plugin, fault.asked, fault.cause)
    assert_told(said, fault.cause, fault.remedy)


def assert_told(said: str, cause: str, remedy: str) -> None:
    """The cause is told, and what is to be done about it is told next."""
    assert cause in said, said
    assert remedy in said.partition(cause)[2].partition(REMEDY)[2].partition("\n")[0], said


@pytest.mark.usefixtures("injected")
def test_of_a_round_without_a_fault_nothing_is_said(plugin: Plugin) -> None:
    said = ask_until(plugin, explain("unharmed"), "It is Complete")
    assert "Nothing is wrong." in said, said
    assert REMEDY not in said, said


def test_a_slow_api_server_is_told_from_one_that_is_well(plugin: Plugin, kube: Kube, tmp_path: Path) -> None:
    assert "API server: it answers within" in plugin(*CHECK, fails=None)
    with slow_way(HOST_ADDRESS, Port.API_SERVER, LATE) as port:
        login = yaml.safe_load(admin_kubeconfig().read_text())
        login["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump(login))
        said = plugin(*CHECK, "--kubeconfig", file, fails=None)
    assert_told(said, "API server: it took ", "look at the load of the API server")
    assert float(said.partition("API server: it took ")[2].split()[0]) >= LATE
