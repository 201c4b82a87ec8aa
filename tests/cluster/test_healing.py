# SPDX-License-Identifier: Apache-2.0
"""Pods that stand still, are evicted, or compute something else."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from operator import gt

import pytest

from hack.deploy.kube import Kube
from hack.deploy.releases import NAMESPACE
from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.apis.v1alpha1.status import SlotState
from poc_operator.observed import PodView
from tests.cluster.objects import ARTIFACT, Rounds, is_running
from tests.cluster.pods import ready_pods, wait_for_replacement
from tests.cluster.results import indices_by_slot
from tests.support.fakes.receiver import Receiver
from tests.support.servers.cluster import ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480, func_only=True)]

STALL: dict[str, object] = {"afterSeconds": 10}
# What vLLM calls the process that computes. A frozen one still leaves the API server answering.
FREEZE = """
import os, pathlib, signal, sys
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    if (folder / "cmdline").read_bytes().startswith(b"VLLM::EngineCore"):
        os.kill(int(folder.name), getattr(signal, sys.argv[1]))
"""


def signal_engine(kube: Kube, pod: PodView, name: str) -> None:
    kube.kubectl("--namespace", NAMESPACE, "exec", pod.name, "--", "python3", "-c", FREEZE, name)


@contextmanager
def frozen(kube: Kube, pod: PodView) -> Iterator[None]:
    signal_engine(kube, pod, "SIGSTOP")
    try:
        yield
    finally:
        signal_engine(kube, pod, "SIGCONT")


def slot_of(round_: PoCRound, pod: PodView) -> Assignment:
    return next(slot for slot in round_.status.assignments if slot.uid == pod.uid)


def assert_nothing_is_missing(round_: PoCRound, receiver: Receiver) -> None:
    for slot, indices in indices_by_slot(round_, receiver):
        assert sorted(set(indices)) == list(range(slot.delivered))


def test_a_pod_that_stands_still_is_told_again_and_nothing_is_lost(
    kube: Kube, rounds: Rounds, receiver: Receiver
) -> None:
    rounds.apply("frozen", **ARTIFACT, callbackURL=receiver.url, stall=STALL)
    rounds.wait_until("frozen", is_running)
    pod = ready_pods(kube)[0]
    with frozen(kube, pod):
        rounds.wait_until("frozen", lambda r: slot_of(r, pod).stalls > 0)
    thawed = rounds.wait_until("frozen", lambda r: slot_of(r, pod).attempts > 1)
    before = slot_of(thawed, pod).start
    rounds.wait_until("frozen", lambda r: slot_of(r, pod).delivered > before)
    rounds.patch("frozen", suspend=True)
    rounds.wait("frozen", "condition=Suspended")
    assert_nothing_is_missing(rounds.settled("frozen"), receiver)


@pytest.mark.long
def test_a_pod_that_stands_still_again_is_deleted_and_its_slot_moves_on(
    kube: Kube, rounds: Rounds, receiver: Receiver
) -> None:
    rounds.apply("stuck", **ARTIFACT, callbackURL=receiver.url, stall={**STALL, "action": "DeletePod"})
    rounds.wait_until("stuck", is_running)
    pods = ready_pods(kube)
    signal_engine(kube, pods[0], "SIGSTOP")
    fresh = wait_for_replacement(kube, pods)
    rounds.wait_until("stuck", lambda r: any(s.uid == fresh.uid and s.next > s.start for s in r.status.assignments))
    rounds.patch("stuck", suspend=True)
    rounds.wait("stuck", "condition=Suspended")
    assert_nothing_is_missing(rounds.settled("stuck"), receiver)


@pytest.mark.long
def test_an_eviction_is_free_of_charge(kube: Kube, rounds: Rounds) -> None:
    rounds.apply("evicted", retry={"backoffLimitPerSlot": 0})
    rounds.wait_until("evicted", is_running)
    pods = ready_pods(kube)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pods[0].name, "namespace": NAMESPACE},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pods[0].name}/eviction"
    kube.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    fresh = wait_for_replacement(kube, pods)
    moved = rounds.wait_until("evicted", lambda r: any(s.uid == fresh.uid and s.session for s in r.status.assignments))
    assert [slot.disruptions for slot in moved.status.assignments if slot.uid == fresh.uid] == [1]
    assert all(slot.state is SlotState.RUNNING for slot in moved.status.assignments)


def test_a_newer_round_replaces_an_older_one_which_then_goes_on(kube: Kube, rounds: Rounds, receiver: Receiver) -> None:
    rounds.apply("older", **ARTIFACT, blockHeight=1, callbackURL=receiver.url)
    older = rounds.wait_until("older", is_running)
    rounds.apply("newer", blockHeight=2, concurrencyPolicy="Replace", stop={"afterNonces": 500})
    rounds.wait("newer", "condition=Complete")
    rounds.wait_until(
        "older",
        lambda r: all(
            gt(now.delivered, then.delivered)
            for now, then in zip(r.status.assignments, older.status.assignments, strict=True)
        ),
    )
    rounds.patch("older", suspend=True)
    rounds.wait("older", "condition=Suspended")
    settled = rounds.settled("older")
    assert_nothing_is_missing(settled, receiver)
    assert all(slot.attempts - slot.disruptions <= 1 for slot in settled.status.assignments), "that is no retry"
    ready(kube)
