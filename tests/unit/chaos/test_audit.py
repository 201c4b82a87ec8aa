# SPDX-License-Identifier: Apache-2.0
"""The audit of a chaos test finds what it is there for."""

import re
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest

from hack.generate.crds import schema
from hack.images.site import ROOT
from poc_operator.apis.v1alpha1.round import PoCRound, Totals
from poc_operator.apis.v1alpha1.status import SlotState
from tests.chaos.audit import Findings, audit, check_orphans
from tests.chaos.faults import schedule
from tests.chaos.inflict import POISON
from tests.chaos.test_random_faults import DECODES
from tests.simulation.engine import Work
from tests.simulation.manifests import Manifest, round_manifest
from tests.simulation.operator_process import LIVENESS, STARTUP
from tests.simulation.session import Poll, Session
from tests.simulation.world import World
from tests.support.checks.admission import admitted, flaws
from tests.unit.poc_operator.build import UID, a_round, a_slot, a_status

HASH = "ab" * 32
BATCH = 10


def session(start: int, end: int, began: float, told: Iterable[tuple[float, int]] = (), *, slot: int = 0) -> Session:
    """A session that computes indices of a slot of two, a batch a second, and tells what is delivered."""
    nonces = [slot + 2 * index for index in range(start, end)]
    work = [
        Work(HASH, nonces[first : first + BATCH], began + first / BATCH, began + first / BATCH + 1, done=True)
        for first in range(0, len(nonces), BATCH)
    ]
    polls = [Poll(time, "s", UID, (0, slot), delivered, delivered) for time, delivered in told]
    made = SimpleNamespace(pod="pod", work=work, polls=polls, born=0.0, died=None)
    return cast(Session, made)


def judged(
    *sessions: Session,
    arrived: Iterable[int] = range(200),
    delivered: int = 100,
    gaps: Iterable[tuple[float, float]] = (),
    outages: Iterable[tuple[float, float]] = (),
    lengths: Iterable[int] = (0,),
) -> Findings:
    """Audit a round of two slots, the second of which is computed without any trouble."""
    arrivals = Counter(arrived)
    slots = [a_slot(group=group, state=SlotState.DONE, delivered=delivered, next=delivered) for group in range(2)]
    totals = Totals(checked=2 * delivered, valid=2 * delivered, delivered=2 * delivered)
    world = SimpleNamespace(
        receiver=SimpleNamespace(arrivals={HASH: arrivals}, chain_lengths={HASH: set(lengths)}),
        kubelet=SimpleNamespace(sessions=[*sessions, session(0, 100, 0, slot=1)]),
        operator=SimpleNamespace(gaps=list(gaps)),
        api_server=SimpleNamespace(outages=list(outages)),
        gateway=None,
    )
    return audit(cast(World, world), a_round(a_status(*slots, totals=totals)))


FIRST = session(0, 60, 0, [(2, 20), (5, 50)])


def test_balanced_books() -> None:
    found = judged(FIRST, session(50, 100, 8))
    assert (found.runs, found.computed, found.repeated, found.arrived_twice) == (3, 210, 10, 0)
    assert found.oldest_knowledge == pytest.approx(1)


def test_a_session_may_go_on_after_another_one_that_took_its_place_for_a_moment() -> None:
    """As when a suspended round is resumed on a spare that dies at once."""
    told = [(5, 50), (10, 50)]
    first = session(0, 50, 0, told)
    first.work += session(50, 100, 6).work  # type: ignore[misc, operator]
    assert judged(first, session(50, 60, 5)).repeated == 10
    with pytest.raises(AssertionError, match="compute it at once"):
        judged(first, session(50, 60, 5.5))


def test_what_arrived_twice_is_counted() -> None:
    assert judged(FIRST, session(50, 100, 8), arrived=[*range(200), 7, 9]).arrived_twice == 2


@pytest.mark.parametrize("lengths", [(0, 13), (13,)], ids=["mixed", "of the other alone"])
def test_results_of_another_scheme_are_found(lengths: Iterable[int]) -> None:
    with pytest.raises(AssertionError, match=r"results of \[.*13\] indices arrived"):
        judged(FIRST, session(50, 100, 8), lengths=lengths)


def test_work_of_another_scheme_is_found() -> None:
    other = session(50, 100, 8)
    other.work[2].chain_length = 13
    with pytest.raises(AssertionError, match="a batch is of another scheme"):
        judged(FIRST, other)


@pytest.mark.parametrize(
    ("problem", "arrived", "sessions"),
    [
        ("1 nonces are lost, the first at 30", {*range(200)} - {60}, [FIRST, session(50, 100, 8)]),
        ("index 100 arrived, but delivered is 100", range(201), [FIRST, session(50, 100, 8)]),
        ("compute it at once", range(200), [FIRST, session(50, 100, 5.5)]),
        ("60 to 70 is left out", range(200), [FIRST, session(70, 100, 8)]),
        ("begins at 10", range(200), [session(10, 100, 0)]),
        ("begins again at 30 of 60, known inf s before", range(200), [FIRST, session(30, 100, 8)]),
    ],
)
def test_what_is_wrong_is_found(problem: str, arrived: Iterable[int], sessions: list[Session]) -> None:
    with pytest.raises(AssertionError, match=problem):
        judged(*sessions, arrived=arrived)


def test_times_without_an_operator_excuse_old_knowledge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.audit.COUNTERS_SECONDS", 5.0)
    sessions = session(0, 60, 0, [(1, 20), (5, 50)]), session(20, 100, 8)
    with pytest.raises(AssertionError, match=r"known 5\.0 s"):
        judged(*sessions)
    assert judged(*sessions, gaps=[(7, 8)]).oldest_knowledge == pytest.approx(1)


def test_what_was_held_back_is_lost_with_an_operator_that_dies_in_an_outage() -> None:
    sessions = session(0, 60, 0, [(1, 20), (5, 50)]), session(20, 100, 8)
    with pytest.raises(AssertionError, match=r"known 5\.0 s"):
        judged(*sessions, outages=[(6, 20)])
    assert judged(*sessions, outages=[(6, 20)], gaps=[(15, 16)]).oldest_knowledge == pytest.approx(0)


def test_work_for_a_round_that_is_over_is_found() -> None:
    world = SimpleNamespace(kubelet=SimpleNamespace(sessions=[session(0, 60, 0)]))
    check_orphans(cast(World, world), since=6.0)
    with pytest.raises(AssertionError, match=r"pod computes 100 of block (ab)* 1\.0 s later"):
        check_orphans(cast(World, world), since=4.0)


def test_the_operator_is_probed_as_the_chart_has_it_probed() -> None:
    template = (ROOT / "charts/vllm-poc-operator/templates/deployment.yaml").read_text()
    startup, _, liveness = (
        template.partition("startupProbe:")[2].partition("securityContext:")[0].partition("livenessProbe:")
    )
    found = [{name: int(value) for name, value in re.findall(r"(\w+): (\d+)", probe)} for probe in (startup, liveness)]
    assert found == [STARTUP, LIVENESS]


@pytest.mark.parametrize(("spec", "status"), [*POISON, (DECODES, {})])
def test_the_api_server_takes_poison_and_chains(spec: Manifest, status: Manifest) -> None:
    assert not admitted(PoCRound, round_manifest("poison", 1, **spec)["spec"])[1]
    assert not flaws(status, schema(PoCRound)["properties"]["status"], "status")


def test_a_seed_decides_everything() -> None:
    assert schedule(7, 600) == schedule(7, 600)
    assert schedule(7, 600) != schedule(8, 600)
