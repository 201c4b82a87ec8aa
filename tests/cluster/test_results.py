# SPDX-License-Identifier: Apache-2.0
"""What a complete round delivered: every nonce once, as the status says, and reproducible."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hack.cluster.layout import HOST_ADDRESS
from hack.deploy.kube import Kube
from hack.deploy.local import SERVED_NAME
from hack.deploy.releases import NAMESPACE, PODS
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.observed import PodView
from tests.cluster.objects import ARTIFACT, SPEC, Rounds
from tests.cluster.pods import generate, ready_pods, replace, status_of, wait_for_replacement
from tests.cluster.results import Value, indices_by_slot, items, slots
from tests.support.fakes.receiver import Receiver, receiving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120, func_only=True)]

NONCES = 4000
SAMPLE = 20
# Two of three nodes are served here: a third of the nonces must not appear.
NODES = {"first": 1, "last": 2, "count": 3}
STRONG = {"name": SERVED_NAME, "seqLen": 64, "strongRng": True}


@dataclass(frozen=True)
class Complete:
    """A round that is complete, and what its receiver got."""

    round: PoCRound
    receiver: Receiver
    spec: dict[str, Any]

    @property
    def values(self) -> dict[int, Value]:
        """The value of each nonce."""
        return dict(items(self.receiver.bodies))

    def sample(self) -> list[int]:
        """Return nonces spread evenly over everything that was computed, received or not."""
        computed = sorted(n for slot, partition in slots(self.round) for n in partition.nonces(0, slot.next))
        return computed[:: len(computed) // SAMPLE][:SAMPLE]


def complete(kube: Kube, name: str, **changes: Any) -> Iterator[Complete]:  # noqa: ANN401
    spec = {field: value for field, value in {**SPEC, **changes}.items() if value is not None}
    with receiving(HOST_ADDRESS) as receiver, Rounds(kube, NAMESPACE) as rounds:
        rounds.run_to_the_end(name, **changes, callbackURL=receiver.url, stop={"afterNonces": NONCES})
        yield Complete(rounds.settled(name), receiver, spec)


@pytest.fixture(scope="module")
def distances(kube: Kube) -> Iterator[Complete]:
    yield from complete(kube, "distances")


@pytest.fixture(scope="module")
def artifacts(kube: Kube, distances: Complete) -> Iterator[Complete]:
    """An artifact round; only after the distance round, since each uses all pods."""
    yield from complete(kube, "artifacts", **ARTIFACT, nodes=NODES, model=STRONG)


@pytest.fixture(scope="module")
def fresh_pod(kube: Kube, distances: Complete, artifacts: Complete) -> PodView:
    """A server that started after both rounds."""
    before = ready_pods(kube)
    sessions = {status_of(pod).session_id for pod in before}
    replace(kube, before[0])
    fresh = wait_for_replacement(kube, before)
    assert status_of(fresh).session_id not in sessions
    return fresh


def test_the_totals_are_what_the_slots_and_the_receiver_say(distances: Complete, artifacts: Complete) -> None:
    for done in (distances, artifacts):
        totals, assignments = done.round.status.totals, done.round.status.assignments
        assert totals.checked == totals.delivered == sum(slot.next for slot in assignments) >= NONCES
        assert totals.valid == sum(slot.valid for slot in assignments) == len(done.values)
        assert (totals.rejected, totals.retries) == (0, 0)
        assert {slot.uid for slot in assignments} == {slot.uid for slot in distances.round.status.assignments}
        assert len(assignments) == PODS
        counts = (done.round.status.desired, done.round.status.running, done.round.status.done)
        assert counts == (PODS, 0, PODS)


def test_every_artifact_of_each_slot_arrives_once_and_in_order(artifacts: Complete) -> None:
    found = indices_by_slot(artifacts.round, artifacts.receiver)
    assert [(slot.node, slot.group) for slot, _ in found] == [(1, 0), (2, 0)]
    for slot, indices in found:
        assert indices == list(range(slot.delivered))


def test_every_valid_nonce_of_each_slot_arrives_once_and_in_order(distances: Complete) -> None:
    found = indices_by_slot(distances.round, distances.receiver)
    assert [(slot.node, slot.group) for slot, _ in found] == [(0, 0), (0, 1)]
    for slot, indices in found:
        assert indices == sorted(set(indices))
        assert len(indices) == slot.valid < slot.delivered
        assert indices[-1] < slot.delivered
    assert all(float(value) < float(SPEC["rTarget"]) for value in distances.values.values())


def test_a_fresh_server_computes_the_same_artifacts(artifacts: Complete, fresh_pod: PodView) -> None:
    sample = artifacts.sample()
    again = generate(fresh_pod, artifacts.spec, sample).artifacts or []
    assert {found["nonce"]: found["vector_b64"] for found in again} == {
        nonce: artifacts.values[nonce] for nonce in sample
    }
    assert len(again) == SAMPLE


def test_a_fresh_server_computes_the_same_distances(distances: Complete, fresh_pod: PodView) -> None:
    sample, received = distances.sample(), distances.values
    again = generate(fresh_pod, distances.spec, sample)
    assert again.nonces == sample
    for nonce, distance in zip(sample, again.distances or [], strict=True):
        if nonce in received:
            assert distance == pytest.approx(received[nonce], abs=1e-6)
        else:
            assert distance >= float(SPEC["rTarget"])
    assert 0 < len(received.keys() & set(sample)) < SAMPLE
