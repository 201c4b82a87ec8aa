# SPDX-License-Identifier: Apache-2.0
"""The operator's loop against pods with the reference implementation, which has none of our additions."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from poc_operator.apis.v1alpha1.conditions import ConditionType
from poc_operator.apis.v1alpha1.round import RoundStatus
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.clients.pods.client import PodClient
from poc_operator.controller.observing import ProgressWatch
from poc_operator.observed import Container
from tests.support.fakes.callback_receiver import CallbackReceiver
from tests.support.fakes.reference_pod import ReferencePod, reference_pod
from tests.support.servers.fleet import RoundFleet
from tests.support.servers.http_server import serve
from tests.unit.poc_operator.build import a_pod
from tests.wire.test_round import complete, computes
from vllm_poc.wire.messages import API_PREFIX

HOSTS = ("127.0.0.1", "127.0.0.2")
SPARE = "127.0.0.3"
#: How a pod leaves a round: what the watch tells of it from then on.
WAYS: dict[str, dict[str, Any]] = {"deleted": {"terminating": True}, "relabelled": {"labels": {}}}
FOREIGN = {
    "block_hash": "other",
    "block_height": 1,
    "public_key": "somebody",
    "node_id": 0,
    "node_count": 1,
    "params": {"model": "tiny", "seq_len": 64},
}


class ReferenceFleet(RoundFleet):
    """A fleet of reference pods; a restart keeps the pod and changes its container's id."""

    containers = 0
    servers: dict[str, ReferencePod]
    releases: Mapping[str, str] = MappingProxyType({})  # by host

    async def start_pod(self, host: str) -> None:  # type: ignore[override]
        """Start a pod, or restart its container."""
        if host in self._servers:
            await self._servers[host].aclose()
        self.containers += 1
        stack = self._servers[host] = await self._stack.enter_async_context(AsyncExitStack())
        self.servers[host] = await stack.enter_async_context(reference_pod(self.releases.get(host, "0.1.7")))
        await stack.enter_async_context(serve(self.servers[host].app, host, self.port))
        sidecar = Container(id="sidecar#0")
        vllm = Container(id=f"vllm{self.containers}#0", ports=frozenset([self.port]))
        self._pods.put(a_pod(f"pod-{host}", ip=host, containers=(sidecar, vllm)))


@asynccontextmanager
async def started(receiver: CallbackReceiver, **spec: Any) -> AsyncIterator[ReferenceFleet]:  # noqa: ANN401
    """Two reference pods, and a round changed by ``spec``."""
    async with AsyncExitStack() as stack, PodClient() as client:
        fleet = ReferenceFleet(stack, receiver, client, **spec)
        fleet.servers = {}
        for host in HOSTS:
            await fleet.start_pod(host)
        yield fleet


@pytest.fixture
async def fleet(receiver: CallbackReceiver) -> AsyncIterator[ReferenceFleet]:
    async with started(receiver) as own:
        yield own


@pytest.fixture
async def endless(receiver: CallbackReceiver) -> AsyncIterator[ReferenceFleet]:
    """The other pod cannot end the round meanwhile."""
    async with started(receiver, stop=None) as own:
        yield own


def leave(fleet: RoundFleet, host: str, **fields: Any) -> None:  # noqa: ANN401
    """Let the watch tell these fields of the host's pod anew."""
    (pod,) = [pod for pod in fleet._pods.everywhere() if pod.ip == host]
    fleet.see(replace(pod, **fields))


def reasons(fleet: RoundFleet) -> list[str]:
    return [event.reason for event in fleet.events]


def progressing(status: RoundStatus) -> tuple[str, str]:
    condition = next(found for found in status.own_conditions if found.type == ConditionType.PROGRESSING)
    return condition.reason, condition.message


async def test_the_fake_refuses_in_the_envelope_of_vllm() -> None:
    """A fake that explains as plain FastAPI does would hide what the operator does not understand."""
    async with reference_pod() as pod:
        transport = httpx.ASGITransport(pod.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://pod{API_PREFIX}") as client:
            missing = await client.post("/init/generate", json={**FOREIGN, "params": None})
            other = await client.post("/init/generate", json={**FOREIGN, "params": {"model": "other", "seq_len": 64}})
            assert (await client.post("/init/generate", json=FOREIGN)).status_code == 200
            busy = await client.post("/init/generate", json=FOREIGN)
    errors = [answer.json()["error"] for answer in (missing, other, busy)]
    assert [
        (answer.status_code, error["code"]) for answer, error in zip((missing, other, busy), errors, strict=True)
    ] == [
        (400, 400),
        (400, 400),
        (409, 409),
    ]
    assert [error["type"] for error in errors] == ["Bad Request", "BadRequestError", "Conflict"]
    assert "'loc': 'body.params'" in errors[0]["message"]
    assert [error["message"] for error in errors[1:]] == [
        "expected string or bytes-like object, got 'dict'",
        "Already generating",
    ]


async def test_a_whole_round(fleet: ReferenceFleet) -> None:
    status = await fleet.reconcile_until(complete)
    assert status.totals.checked == status.totals.delivered == status.totals.valid >= 400
    assert [(slot.state, slot.session, slot.error) for slot in status.assignments] == [
        ("Done", "vllm1#0", None),
        ("Done", "vllm2#0", None),
    ]
    assert {nonce % 2 for nonce in fleet.receiver.nonces} == {0, 1}
    assert len(set(fleet.receiver.nonces)) == len(fleet.receiver.nonces)
    assert [pod.request for pod in fleet.servers.values()] == [None, None]
    assert reasons(fleet) == ["Started", "Completed"]


async def test_a_round_ends_once_its_pods_have_drained(fleet: ReferenceFleet) -> None:
    """They say at once that they are idle. Another round would begin beside their last passes."""
    for server in fleet.servers.values():
        server.drain_seconds = 0.5
    await fleet.reconcile_until(complete)
    assert [server.draining for server in fleet.servers.values()] == [False, False]
    assert all(server.starts for server in fleet.servers.values())


async def test_a_restarted_pod_begins_anew(fleet: ReferenceFleet) -> None:
    before = await fleet.reconcile_until(computes)
    await fleet.start_pod(HOSTS[0])
    status = await fleet.reconcile_until(complete)
    slot = status.assignments[0]
    assert (slot.start, slot.attempts, slot.session) == (0, 2, "vllm3#0")
    assert before.assignments[0].delivered > 0
    assert status.totals.checked >= 400
    assert reasons(fleet) == ["Started", "WorkLost", "Completed"]


async def test_a_container_that_restarts_between_two_polls_is_noticed(endless: ReferenceFleet) -> None:
    """Somebody else starts the same slot on the new server: its counters are not taken for the old one's."""
    fleet = endless
    await fleet.reconcile_until(computes)
    request = fleet.servers[HOSTS[0]].request
    assert request is not None
    await fleet.start_pod(HOSTS[0])
    await fleet.servers[HOSTS[0]].start(request)
    await fleet.reconcile_until(lambda status: status.totals.retries == 1)
    assert reasons(fleet) == ["Started", "WorkLost"]
    await fleet.reconcile_until(lambda status: status.assignments[0].session == "vllm3#0")
    assert fleet.servers[HOSTS[0]].starts == 2  # what nobody recorded may be of another scheme


async def test_a_new_operator_adopts_what_runs(fleet: ReferenceFleet) -> None:
    before = await fleet.reconcile_until(computes)
    fleet.operator = fleet.new_operator()
    status = await fleet.reconcile_until(complete)
    assert [slot.session for slot in status.assignments] == [slot.session for slot in before.assignments]
    assert [pod.starts for pod in fleet.servers.values()] == [1, 1]
    assert status.totals.retries == 0


async def test_a_start_whose_answer_was_lost_is_adopted(fleet: ReferenceFleet) -> None:
    await fleet.reconcile_until(lambda status: status.slots == 2)  # recorded, and on its way
    await fleet.operator.close()
    fleet.operator = fleet.new_operator()
    status = await fleet.reconcile_until(complete)
    assert [pod.starts for pod in fleet.servers.values()] == [1, 1]
    assert [slot.attempts for slot in status.assignments] == [1, 1]


async def test_a_pod_that_stands_still_is_stopped_and_told_again(
    fleet: ReferenceFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.reconcile_until(computes)
    fleet.servers[HOSTS[0]].hangs = True
    seconds = 0.0

    def clock() -> float:
        nonlocal seconds
        seconds += 20
        return seconds

    fleet.operator._watch = ProgressWatch(clock)
    await fleet.reconcile_until(lambda status: status.assignments[0].stalls == 1)
    fleet.servers[HOSTS[0]].hangs = False
    await fleet.reconcile_until(complete)
    assert fleet.servers[HOSTS[0]].starts == 2
    assert reasons(fleet) == ["Started", "Stalled", "WorkLost", "Completed"]


@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
async def test_a_pod_that_leaves_is_stopped_before_another_gets_its_slot(
    endless: ReferenceFleet, fields: dict[str, Any]
) -> None:
    fleet = endless
    await fleet.reconcile_until(computes)
    leave(fleet, HOSTS[0], **fields)
    status = await fleet.reconcile_until(lambda status: status.assignments[0].state is SlotState.WAITING)
    assert (fleet.servers[HOSTS[0]].request, status.assignments[0].pod) == (None, None)
    assert fleet.servers[HOSTS[1]].request is not None
    await fleet.start_pod(SPARE)
    status = await fleet.reconcile_until(computes)
    slot = status.assignments[0]
    assert (slot.pod, slot.session, slot.start, slot.attempts) == (f"pod-{SPARE}", "vllm3#0", 0, 2)
    assert [pod.starts for pod in fleet.servers.values()] == [1, 1, 1]
    assert reasons(fleet) == ["Started", "SlotsLeaving", "WorkLost"]


async def test_foreign_work_is_waited_for_and_not_stopped(fleet: ReferenceFleet) -> None:
    for host in HOSTS:
        async with httpx.AsyncClient(timeout=30) as client:
            url = f"http://{host}:{fleet.port}{API_PREFIX}/init/generate"
            assert (await client.post(url, json=FOREIGN)).status_code == 200
    status = await fleet.reconcile_until(lambda status: bool(status.conditions))
    reason, message = progressing(status)
    assert reason == "PodsBusy"
    assert "round without id, height 1" in message
    for pod in fleet.servers.values():
        assert pod.request is not None
        assert pod.request.block_hash == "other"
        await pod.stop()
    await fleet.reconcile_until(complete)


async def test_suspension_and_resumption(fleet: ReferenceFleet) -> None:
    await fleet.reconcile_until(computes)
    fleet.suspend(True)
    await fleet.reconcile_until(lambda status: status.state == "Suspended")
    assert [pod.request for pod in fleet.servers.values()] == [None, None]
    fleet.suspend(False)
    status = await fleet.reconcile_until(complete)
    assert [(slot.start, slot.error) for slot in status.assignments] == [(0, None)] * 2


async def test_a_refusal_is_forgotten_with_the_start_that_it_answered(fleet: ReferenceFleet) -> None:
    fleet.servers[HOSTS[0]].engine_runs = False
    status = await fleet.reconcile_until(lambda status: any(slot.error for slot in status.assignments))
    assert status.assignments[0].error == f"pod pod-{HOSTS[0]} refused to start: Engine not available"
    fleet.suspend(True)
    await fleet.reconcile_until(lambda status: status.state == "Suspended")
    fleet.servers[HOSTS[0]].engine_runs = True
    fleet.suspend(False)
    await fleet.reconcile_until(computes)


async def test_another_model_is_told_in_the_slot_the_condition_and_an_event(receiver: CallbackReceiver) -> None:
    async with started(receiver, model={"name": "other", "seqLen": 64}) as fleet:
        status = await fleet.reconcile_until(lambda status: any(slot.error for slot in status.assignments))
        assert "serves another model" in (status.assignments[0].error or "")
        assert reasons(fleet)[0] == "WorkLost"
        status = await fleet.reconcile_until(lambda status: progressing(status)[0] == "ModelMismatch")
        assert "the pod refused to start: the pod serves another model" in progressing(status)[1]


async def test_a_deleted_round_stops_its_pods(fleet: ReferenceFleet) -> None:
    await fleet.reconcile_until(computes)
    fleet.delete()
    await fleet.reconcile_to_release()
    assert [pod.request for pod in fleet.servers.values()] == [None, None]


async def test_the_distance_protocol_is_refused_with_the_pods_reason(receiver: CallbackReceiver) -> None:
    async with AsyncExitStack() as stack, PodClient() as client:
        fleet = ReferenceFleet(stack, receiver, client, rTarget="1.4", artifact=None)
        fleet.servers = {}
        await fleet.start_pod(HOSTS[0])
        status = await fleet.reconcile_until(lambda status: any(slot.error for slot in status.assignments))
        assert "params" in (status.assignments[0].error or "")
