# SPDX-License-Identifier: Apache-2.0
"""Rounds that are suspended, deleted or bereft of a pod or the operator while they run."""

from operator import gt

import pytest

from hack.deploy.kube import Kube
from hack.deploy.releases import NAMESPACE, SYSTEM_NAMESPACE
from hack.toolchain.common import UserError, wait_until
from poc_operator.apis.v1alpha1.round import PoCRound
from tests.cluster.gateway import results_of, wait_until_forwarded
from tests.cluster.objects import ARTIFACT, Rounds, hold, is_running
from tests.cluster.pods import ready_pods, replace, statuses, wait_for_replacement
from tests.cluster.results import indices_by_slot
from tests.support.fakes.receiver import Receiver
from tests.support.servers.cluster import ready
from vllm_poc.wire.answers import PowState

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480, func_only=True)]

STOP_SECONDS = 60.0


def sessions(round_: PoCRound) -> list[str | None]:
    return [slot.session for slot in round_.status.assignments]


def delivered(round_: PoCRound) -> list[int]:
    return [slot.delivered for slot in round_.status.assignments]


def operator_uids(kube: Kube) -> list[str]:
    pods = kube.get("--namespace", SYSTEM_NAMESPACE, "pods")["items"]
    return [pod["metadata"]["uid"] for pod in pods]


def no_pod_computes(kube: Kube) -> bool:
    return all(status.state is not PowState.GENERATING for status in statuses(kube))


def assert_each_nonce_once(round_: PoCRound, receiver: Receiver) -> None:
    for slot, indices in indices_by_slot(round_, receiver):
        assert indices == list(range(slot.delivered))


def test_a_suspended_round_stops_its_pods_and_goes_on_where_it_was(
    kube: Kube, rounds: Rounds, receiver: Receiver
) -> None:
    rounds.apply("suspended", **ARTIFACT, callbackURL=receiver.url)
    rounds.wait_until("suspended", is_running)
    rounds.patch("suspended", suspend=True)
    rounds.wait("suspended", "condition=Suspended")
    stopped, arrived = rounds.settled("suspended"), len(receiver.bodies)
    assert_each_nonce_once(stopped, receiver)
    assert hold(3, lambda: no_pod_computes(kube) and len(receiver.bodies) == arrived)
    rounds.patch("suspended", suspend=False)
    rounds.wait_until("suspended", lambda now: all(map(gt, delivered(now), delivered(stopped))))
    rounds.patch("suspended", suspend=True)
    rounds.wait("suspended", "condition=Suspended")
    assert_each_nonce_once(rounds.settled("suspended"), receiver)


def test_a_round_is_finished_before_its_time(kube: Kube, rounds: Rounds) -> None:
    rounds.apply("early", stop={"afterSeconds": 3600})
    rounds.wait_until("early", is_running)
    rounds.patch("early", finish=True)
    rounds.wait("early", "condition=Complete")
    early = rounds.get("early")
    assert early.status.message.startswith("spec.finish is set")
    assert early.status.totals.checked == early.status.totals.delivered > 0
    assert no_pod_computes(kube)
    with pytest.raises(UserError, match=r"spec\.finish"):
        rounds.patch("early", finish=False)


def test_a_deleted_round_stops_its_pods_and_the_next_one_gets_them(
    kube: Kube, rounds: Rounds, receiver: Receiver
) -> None:
    rounds.apply("first", blockHeight=1)
    first = rounds.wait_until("first", is_running)
    rounds.apply("second", **ARTIFACT, blockHeight=2, callbackURL=receiver.url, stop={"afterNonces": 2000})
    message = rounds.wait_for_reason("second", "Progressing", "PodsBusy")
    assert f"round {NAMESPACE}/first, height 1); wait for it or stop it" in message
    rounds.delete("first")
    assert not [s for s in statuses(kube) if s.round_id == first.id and s.state is PowState.GENERATING]
    rounds.wait("second", "condition=Complete")
    assert_each_nonce_once(rounds.settled("second"), receiver)
    assert no_pod_computes(kube)


def test_the_pods_of_the_only_round_are_idle_after_its_deletion(kube: Kube, rounds: Rounds, receiver: Receiver) -> None:
    rounds.apply("only", callbackURL=receiver.url)
    rounds.wait_until("only", is_running)
    rounds.delete("only")
    assert wait_until(lambda: {status.status for status in statuses(kube)} == {PowState.IDLE}, STOP_SECONDS)
    wait_until_forwarded(kube, "only")
    arrived = len(receiver.bodies)
    assert hold(3, lambda: len(receiver.bodies) == arrived)


def test_a_finished_round_is_deleted_after_its_time_to_live(rounds: Rounds) -> None:
    rounds.apply("short-lived", stop={"afterNonces": 100}, ttlSecondsAfterFinished=3)
    rounds.wait("short-lived", "condition=Complete")
    rounds.wait("short-lived", "delete", seconds=20)


def test_a_lost_pod_is_replaced_and_goes_on_after_the_last_stored_nonce(
    kube: Kube, rounds: Rounds, receiver: Receiver
) -> None:
    rounds.apply("bereft", **ARTIFACT, callbackURL=receiver.url)
    rounds.wait_until("bereft", is_running)
    pods = ready_pods(kube)
    replace(kube, pods[0])
    fresh = wait_for_replacement(kube, pods)
    rounds.wait_until("bereft", lambda r: any(s.uid == fresh.uid and s.next > s.start for s in r.status.assignments))
    rounds.patch("bereft", suspend=True)
    rounds.wait("bereft", "condition=Suspended")
    after = rounds.settled("bereft")
    assert after.status.totals.retries == 1
    assert next(slot.start for slot in after.status.assignments if slot.uid == fresh.uid) > 0
    assert_each_nonce_once(after, receiver)
    with results_of(kube) as client:
        stored = client.get(f"/rounds/{NAMESPACE}/bereft/progress").json()
    assert (stored["stored"], stored["duplicates"], stored["conflicts"]) == (after.status.totals.delivered, 0, 0)


def test_a_killed_operator_changes_nothing_for_the_pods(kube: Kube, rounds: Rounds, receiver: Receiver) -> None:
    rounds.apply("orphan", **ARTIFACT, callbackURL=receiver.url, stop={"afterSeconds": 60})
    before, killed = rounds.wait_until("orphan", is_running), operator_uids(kube)
    kube.kubectl("--namespace", SYSTEM_NAMESPACE, "delete", "pods", "--all", "--grace-period=0", "--force")
    assert wait_until(lambda: operator_uids(kube) not in ([], killed), STOP_SECONDS)
    ready(kube)
    seen = rounds.get("orphan")
    assert seen.status.completion_time is None
    rounds.wait_until("orphan", lambda now: all(map(gt, delivered(now), delivered(seen))))
    rounds.wait("orphan", "condition=Complete")
    done = rounds.settled("orphan")
    assert sessions(done) == sessions(before)
    assert set(sessions(done)) == {status.session_id for status in statuses(kube)}
    assert [slot.attempts for slot in done.status.assignments] == [1, 1]
    assert_each_nonce_once(done, receiver)
