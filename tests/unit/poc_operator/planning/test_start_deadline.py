# SPDX-License-Identifier: Apache-2.0
"""The start deadline of every kind leaves out the time in which rounds have the pods, or a pod loads its model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.status import WorkStatus
from poc_operator.apis.v1alpha1.validation import Proof
from poc_operator.calibrations import plan as calibrations
from poc_operator.observed import Container, PodReport, PodView
from poc_operator.planning.snapshot import OtherRound, Snapshot
from poc_operator.rounds import plan as rounds
from poc_operator.rounds.snapshot import RoundSnapshot
from poc_operator.validations import plan as validations
from tests.unit.poc_operator.build import NOW, a_calibration, a_pod, a_round, a_validation, says
from tests.unit.poc_operator.planning.test_eligibility import holding

LIMIT = 900
PROOFS = [Proof(nonce=0, vector="AAAA")]
#: Goes before every round of these tests, and has the pod "a".
FIRST = OtherRound(
    id="first",
    name="ns/first",
    place=(0, 1, 0, NOW - timedelta(hours=1), "first"),
    priority=0,
    replaces=False,
    block=("ab", 7, "key"),
    held=frozenset("a"),
)
COMPUTES_FIRST = holding(7, "first")
IDLE = says()


@dataclass(frozen=True)
class Kind:
    """A kind of work: how it is made, and how it is planned."""

    make: Callable[..., Any]
    snapshot: type[Snapshot[Any]]
    plan: Callable[[Any], Any]
    fields: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "round": Kind(a_round, RoundSnapshot, rounds.plan),
    "validation": Kind(a_validation, validations.ValidationSnapshot, validations.plan, {"proofs": PROOFS}),
    "calibration": Kind(a_calibration, calibrations.CalibrationSnapshot, calibrations.plan),
}


@dataclass
class World:
    """One object, which looks at pods again and again."""

    kind: Kind
    status: Any = None
    seconds: int = 0

    def look(
        self, *pods: tuple[PodView, PodReport], others: Sequence[OtherRound] | None = (FIRST,), seconds: int = 2
    ) -> WorkStatus:
        """Plan twice: after so many seconds, and 2 s later."""
        for passed in (seconds, 2):
            self.seconds += passed
            seen = self.kind.snapshot(
                work=self.kind.make(self.status, startDeadlineSeconds=LIMIT),
                pods=[pod for pod, _ in pods],
                reports={pod.uid: report for pod, report in pods},
                now=NOW + timedelta(seconds=self.seconds),
                find_other_rounds=lambda: others,
                **self.kind.fields,
            )
            self.status = self.kind.plan(seen).status
        status: WorkStatus = self.status
        return status


@pytest.fixture(params=list(KINDS))
def world(request: pytest.FixtureRequest) -> World:
    return World(KINDS[request.param])


def failure(status: WorkStatus) -> str | None:
    return status.outcome.reason if status.outcome is not None else None


def test_it_does_not_run_while_a_round_has_the_pods(world: World) -> None:
    for _ in range(3):
        status = world.look((a_pod("a"), COMPUTES_FIRST), seconds=2 * LIMIT)
    assert (failure(status), status.idle_time) == (None, None)
    status = world.look((a_pod("a"), IDLE), others=())
    assert any(share.pod == "a" for share in status.shares)


def test_it_runs_from_when_the_round_is_over(world: World) -> None:
    world.look((a_pod("a"), COMPUTES_FIRST), seconds=2 * LIMIT)
    world.look(others=())
    assert failure(world.look(others=(), seconds=LIMIT - 10)) is None
    assert failure(world.look(others=(), seconds=10)) == Reason.START_DEADLINE_EXCEEDED


@pytest.mark.parametrize("kind", ["validation", "calibration"])
def test_samples_whose_pod_a_round_has_taken_wait_for_it(kind: str) -> None:
    world = World(KINDS[kind])
    world.look((a_pod("a"), IDLE), others=())
    for _ in range(2):
        status = world.look((a_pod("a"), COMPUTES_FIRST), seconds=2 * LIMIT)
    assert (failure(status), status.idle_time, status.start_time) == (None, None, NOW + timedelta(seconds=4))


def test_it_runs_while_a_pod_that_no_round_has_computes_work_of_others(world: World) -> None:
    pods = ((a_pod("a"), COMPUTES_FIRST), (a_pod("b"), holding(7, "foreign")))
    world.look(*pods)
    assert failure(world.look(*pods, seconds=LIMIT)) == Reason.START_DEADLINE_EXCEEDED


def test_a_new_operator_fails_nothing_before_it_has_read_the_rounds(world: World) -> None:
    assert failure(world.look(others=None, seconds=2 * LIMIT)) is None
    assert failure(world.look(others=())) == Reason.START_DEADLINE_EXCEEDED


def test_a_pod_that_loads_its_model_is_waited_for(world: World) -> None:
    server = Container(id="c", running_since=NOW, startup_seconds=3600, started=False)
    loading = a_pod("a", ready=False, waiting_for="ContainersNotReady", containers=(server,))
    for _ in range(3):
        assert failure(world.look((loading, PodReport()), others=(), seconds=LIMIT)) is None
    assert failure(world.look((loading, PodReport()), others=(), seconds=3 * LIMIT)) == Reason.START_DEADLINE_EXCEEDED
