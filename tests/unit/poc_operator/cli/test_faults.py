# SPDX-License-Identifier: Apache-2.0
"""Faults as a user meets them: ``explain`` or ``check`` names cause and remedy, and an alert calls who must act.

What is told is made by what makes it in a cluster: the plans of rounds and fleets, the client of pods, the pod's own
admission, the gateway's poster, and OpenSSL.
"""

import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from hack.generate.runbooks import rules
from poc_gateway.outbox.post import Poster
from poc_gateway.server.tls import Certificate
from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_upkeep import Fingerprint
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.cli import preflight
from poc_operator.cli.explanation import Evidence, account, sentences
from poc_operator.cli.explanation import explained as explained_reason
from poc_operator.cli.gateway_proxy import Forwarding, Place
from poc_operator.cli.preflight import Check
from poc_operator.clients.errors import PodError
from poc_operator.clients.pods.client import STATUS_SECONDS, PodClient
from poc_operator.fleets.download import DownloadSeen
from poc_operator.fleets.plan import FleetSnapshot
from poc_operator.fleets.plan import plan as plan_fleet
from poc_operator.observed import PodReport, PodView
from poc_operator.rounds.plan import plan
from tests.monitoring.cases import CASES
from tests.support.builders.certificates import issue_expired
from tests.support.builders.forwarding import settings
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.pod import running_pod
from tests.unit.poc_operator.build import NOW, a_pod, a_round, a_slot, a_status, look, says
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet
from tests.unit.poc_operator.fleets.test_checked_pods import a_pod as a_checked_pod
from tests.unit.poc_operator.fleets.test_checked_pods import an_answer
from tests.unit.poc_operator.fleets.test_self_check import engine
from tests.unit.poc_operator.rounds.world import World
from vllm_poc.wire.answers import PowState

GATEWAY = Place(namespace="poc-system", name="gateway")
#: Alerts fire so many minutes after the fault at the latest; those of ``CASES`` begin at 5 min.
AT_ONCE = 8
Told = Sequence[str]


@dataclass(frozen=True)
class Fault:
    """A fault. ``alert`` calls who must act; empty where nobody must, or only who created the object.

    ``reason`` is the label of an alert that is for some reasons alone.
    """

    tell: Callable[[Path], Awaitable[Told]]
    cause: str
    remedy: str
    alert: str = ""
    reason: str = ""


def explained(subject: PoCRound | PoCFleet, *pods: PodView, **more: Any) -> Told:  # noqa: ANN401 - of `Evidence`
    """Return what ``explain`` prints."""
    return sentences(account(Evidence(subject=subject, now=NOW, pods=pods, **more)))


def checked(*found: Check) -> Told:
    """Return what ``check`` prints of what is not well."""
    return [f"{one.about}: {one.finding}\nWhat to do: {one.remedy}" for one in found if one.remedy]


def planned(round_: PoCRound, *pods: tuple[PodView, PodReport | None]) -> Told:
    """Plan a round, and explain what the operator writes down."""
    status = plan(look(round_, *pods)).status
    return explained(round_.model_copy(update={"status": status}), *(pod for pod, _ in pods))


def fleet_of(*pods: PodView, **more: Any) -> tuple[PoCFleet, Sequence[PodView]]:  # noqa: ANN401 - of `FleetSnapshot`
    """Plan a fleet with these pods; return it as the operator writes it down."""
    fleet = more.pop("fleet", a_fleet(replicas=len(pods)))
    step = plan_fleet(FleetSnapshot(fleet=fleet, around=AROUND, now=NOW, pods=pods, **more))
    return fleet.model_copy(update={"status": step.status}), pods


def a_parsed_pod(**status: Any) -> PodView:  # noqa: ANN401 - of a pod
    """Return a pod that is not ready, as the API server has it."""
    body = seen.a_pod("demo-0", ready=False)
    body["status"] |= status
    return PodView.parse(body)


async def wrong_token(_: Path) -> Told:
    port = free_port()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_POC_TOKEN", "right" * 8)
        async with running_pod() as pod, serve(pod.app, "127.0.0.1", port), PodClient("wrong") as client:
            with pytest.raises(PodError) as refused:
                await client.status(f"http://127.0.0.1:{port}/api/v1/pow")
    return planned(a_round(), (a_pod("a"), PodReport(error=str(refused.value))))


async def network_policy(_: Path) -> Told:
    return planned(a_round(), (a_pod("a"), PodReport(error=f"no answer within {STATUS_SECONDS:.0f} s")))


def undelivered(error: str) -> Told:
    """Explain a round whose pod has results that its receiver does not take."""
    fields: dict[str, Any] = {"next_index": 90, "delivered_index": 30, "delivery_error": error}
    running = a_round(a_status(a_slot(next=80, delivered=30)), stop=None)
    report = replace(says(PowState.GENERATING, **fields), undelivered_seconds=90)
    return planned(running, (a_pod("a"), report))


async def full_disk_of_the_pods_receiver(_: Path) -> Told:
    return undelivered("http://gateway:8080/callbacks/ns/r/round-uid: HTTP 507")


async def full_disk(_: Path) -> Told:
    about = explained(a_round(), forwarding=Forwarding(place=GATEWAY, storage_full=True, knows_round=True))
    return [*about, *checked(preflight.gateway_disk("gateway poc-system/gateway", full=True))]


async def posted(url: str) -> Told:
    """Post once as the gateway does, and explain the round whose results the receiver does not take."""
    async with Poster(settings()) as poster:
        answer = await poster.post(url, "{}")
    told = Forwarding(place=GATEWAY, receiver=url, backlog=300, last_error=answer.reason)
    return explained(a_round(), forwarding=told)


async def receiver_away(_: Path) -> Told:
    return await posted(f"http://127.0.0.1:{free_port()}")


async def expired_certificate(folder: Path) -> Told:
    issue_expired(folder, "receiver")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    trusting = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusting)
        server = TestServer(web.Application(), host="127.0.0.1", scheme="https")
        await server.start_server(ssl=context)
        try:
            return await posted(f"https://127.0.0.1:{server.port}")
        finally:
            await server.close()


async def expired_certificate_of_the_gateway(folder: Path) -> Told:
    issue_expired(folder, "gateway")
    certificate = Certificate(folder / "tls.crt", folder / "tls.key")
    assert certificate.expires is not None
    return checked(preflight.gateway_certificate("gateway poc-system/gateway", certificate.expires, datetime.now(UTC)))


async def sick_gpu(_: Path) -> Told:
    pods = [a_checked_pod(number) for number in range(3)]
    vectors = [engine(1, pod=1), engine(1, pod=2), engine(7)]
    marks = Fingerprint()
    answers = {pod.uid: an_answer(pod, found, fingerprint=marks) for pod, found in zip(pods, vectors, strict=True)}
    fleet = a_fleet(replicas=3, selfCheck={})
    found, seen_pods = fleet_of(*pods, fleet=fleet, answers=answers)
    return explained(found, *seen_pods)


async def hung_engine(_: Path) -> Told:
    report = says(PowState.GENERATING, next_index=40, delivered_index=40)
    hung = PodReport(status=report.status, stalled_seconds=10_000)
    return planned(a_round(a_status(a_slot(next=40, delivered=40)), stop=None), (a_pod("a"), hung))


async def crash_loop(_: Path) -> Told:
    ended = {"reason": "Error", "exitCode": 1, "message": "ValueError: No supported config format found in org/modell"}
    container = {
        "name": "vllm",
        "ready": False,
        "restartCount": 6,
        "containerID": "containerd://1",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    fleet, pods = fleet_of(a_parsed_pod(containerStatuses=[container]))
    return explained(fleet, *pods)


async def poison_round(_: Path) -> Told:
    """Each pod that computes the round ends."""
    spec: dict[str, Any] = {"retry": {"policy": "Resume", "backoffLimitPerSlot": 2, "backoffLimit": 6}, "stop": None}
    world = World(round=a_round(nodes={"first": 0, "last": 0, "count": 1, "groups": 1}, **spec))
    world.add_pod()
    for _turn in range(40):
        if world.round.status.state.finished:
            break
        world.reconcile()
        for name in list(world.in_flight):
            world.land(name)
        world.reconcile()
        world.pods["p1"].restart()
    return explained(world.round, a_pod("p1"))


def unscheduled(words: str) -> PodView:
    """Return a pod that the scheduler leaves where it is, with its words."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    body = seen.a_pod("demo-0", ready=False)
    del body["spec"]["nodeName"]
    body["status"] |= {"conditions": [condition], "containerStatuses": []}
    return PodView.parse(body)


async def missing_claim(_: Path) -> Told:
    waits = unscheduled('0/3 nodes are available: persistentvolumeclaim "weights" not found.')
    told = planned(a_round(), (waits, None))
    return [*told, *checked(preflight.claim("poc", "weights", None, of="the fleet demo"))]


def told_of_fleet(fleet: PoCFleet, *pods: PodView) -> Told:
    """Return what ``explain`` and ``check`` print of a fleet, each of which must do alone."""
    about = [explained(fleet, *pods), checked(*preflight.fleets([fleet], ""))]
    for text in map("\n".join, about):
        assert fleet.status.message[1:] in text  # as a sentence it begins with a capital
        assert (EXPLANATIONS[Reason(fleet.status.reason)].remedy or "a remedy") in text
    return [line for one in about for line in one]


async def missing_claim_of_a_fleet(_: Path) -> Told:
    fleet, pods = fleet_of(unscheduled('0/3 nodes are available: persistentvolumeclaim "weights" not found.'))
    return told_of_fleet(fleet, *pods)


async def missing_claim_of_a_download(_: Path) -> Told:
    waits = unscheduled('0/3 nodes are available: persistentvolumeclaim "weights" not found.')
    cached = a_fleet(cache={"existingClaim": "weights", "download": True})
    fleet, _pods = fleet_of(fleet=cached, download=DownloadSeen(pods=[waits]))
    return told_of_fleet(fleet)


async def too_few_gpus(_: Path) -> Told:
    fleet, pods = fleet_of(unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."))
    return told_of_fleet(fleet, *pods)


async def wrong_model(_: Path) -> Told:
    return planned(a_round(model={"name": "demmo", "seqLen": 64}), (a_pod("a"), says()))


async def slow_api_server(_: Path) -> Told:
    renewed = {
        "spec": {"holderIdentity": "operator-1", "renewTime": seen.START.isoformat(), "leaseDurationSeconds": 15}
    }
    late = seen.START.replace(year=seen.START.year + 1)
    return checked(preflight.api_server(6.0), preflight.lease(renewed, late, preflight.operator_log([])))


FAULTS = {
    "wrong token": Fault(
        wrong_token,
        "refuses the operator's token: a (HTTP 401, Unauthorized: send",
        "restart them after",
        "PoCRoundsIdle",
    ),
    "full disk": Fault(
        full_disk, "The disk of the gateway poc-system/gateway is full", "Enlarge", "PoCGatewayDiskFull"
    ),
    "full disk, as pods see it": Fault(
        full_disk_of_the_pods_receiver,
        "pod",
        "give the gateway's volume room",
        "PoCWorkDegraded",
        Reason.DELIVERIES_FAILING,
    ),
    "receiver away": Fault(
        receiver_away, "Cannot connect to host", "whether the receiver runs", "PoCReceiverUnreachable"
    ),
    "sick GPU vectors": Fault(
        sick_gpu, "demo-2 (32 of 32 nonces differ", "Compare their fingerprints", "PoCFleetDegraded"
    ),
    "hung engine": Fault(
        hung_engine, "pod a has made no progress for", "Look at that pod's log", "PoCWorkDegraded", Reason.SLOTS_STALLED
    ),
    "crash loop": Fault(
        crash_loop, "No supported config format found in org/modell", "logs demo-0", "PoCFleetDegraded"
    ),
    "poison round": Fault(poison_round, "slot was given up", "Find out why pods restart", "PoCRoundFailed"),
    "missing PVC": Fault(missing_claim, 'persistentvolumeclaim "weights" not found', "create it, or", "PoCRoundsIdle"),
    "missing PVC of a fleet": Fault(
        missing_claim_of_a_fleet,
        'no Kubernetes node can take demo-0 (0/3 nodes are available: persistentvolumeclaim "weights" not found.)',
        "create that, or correct `spec.cache.existingClaim`",
        "PoCFleetDegraded",
    ),
    "missing PVC of a download": Fault(
        missing_claim_of_a_download,
        "org/model is not downloaded: no Kubernetes node can take demo-0 (0/3 nodes are available: ",
        "create that, or correct `spec.cache.existingClaim`",
        "PoCFleetDegraded",
    ),
    "too few GPUs": Fault(
        too_few_gpus, "3 Insufficient nvidia.com/gpu", "free some or add Kubernetes nodes", "PoCFleetDegraded"
    ),
    "wrong model name": Fault(wrong_model, '"demmo" but the pod serves "demo"', "served name", "PoCRoundsIdle"),
    "network policy in the way": Fault(network_policy, "a (no answer within 5 s)", "network policies", "PoCRoundsIdle"),
    "expired certificate": Fault(
        expired_certificate, "certificate has expired", "Renew the receiver's certificate", "PoCReceiverUnreachable"
    ),
    "expired certificate of the gateway": Fault(
        expired_certificate_of_the_gateway,
        "it has expired at 2020-01-02 00:00 UTC: the network node cannot connect",
        "renew the Secret of gateway.tls.existingSecret",
        "PoCGatewayCertificateExpired",
    ),
    "API server slow": Fault(slow_api_server, "it took 6.0 s", "load of the API server", "PoCOperatorAbsent"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_cause_and_remedy_of_a_fault_are_named(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    text = "\n".join(await fault.tell(tmp_path))
    assert fault.cause in text, text
    assert fault.remedy in text.partition("What to do")[2], text


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.alert])
def test_who_must_act_on_a_fault_is_called_within_three_minutes(name: str) -> None:
    fault = FAULTS[name]
    (rule,) = [one for one in rules() if one["alert"] == fault.alert]
    assert rule["labels"]["severity"] == "critical"
    assert fault.reason in rule["expr"]
    assert CASES[fault.alert].minutes <= AT_ONCE


@pytest.mark.parametrize(
    ("setting", "value"), [("private", ""), ("allow", "network.example.org")], ids=["private", "allow"]
)
async def test_an_address_that_the_gateway_does_not_send_to_leads_to_the_charts_value(setting: str, value: str) -> None:
    """As the gateway tells it, and as the operator repeats it where the gateway may not be asked."""
    url = f"http://127.0.0.1:{free_port()}"
    async with Poster(settings(**{f"receiver_{setting}": value})) as poster:
        reason = (await poster.post(url, "{}")).reason
    told = explained(a_round(), forwarding=Forwarding(place=GATEWAY, receiver=url, backlog=300, last_error=reason))
    assert f"  What to do: If results may be sent there, add the {_ADDED[setting]}" in "\n".join(told)
    message = f"the receiver does not take results ({url}: {reason}); 300 results wait"
    finding = explained_reason(Reason.RECEIVER_FAILING, message, Evidence(subject=a_round(), now=NOW))
    assert finding.remedy == f"If results may be sent there, add the {_ADDED[setting]}"


_ADDED = {
    "private": "address's range to gateway.receivers.private of the chart's values.",
    "allow": "host to gateway.receivers.allow of the chart's values.",
}
