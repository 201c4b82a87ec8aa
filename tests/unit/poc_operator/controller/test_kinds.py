# SPDX-License-Identifier: Apache-2.0
"""What the plans of each kind see: the rounds beside them, and of a validation its ConfigMap, which is read now and
then, and parsed when it has changed.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import pytest

from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller import kinds
from poc_operator.controller.kinds import CalibrationPlanner, Planner, RoundPlanner, Sources, ValidationPlanner
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.planning.snapshot import Snapshot
from poc_operator.validations import plan as validations
from tests.unit.poc_operator.build import NOW, UID, a_calibration, a_pod, a_round, a_validation
from tests.unit.poc_operator.planning.test_start_deadline import COMPUTES_FIRST, FIRST, LIMIT

PROOFS = json.dumps([{"nonce": nonce, "vector": "AAAA"} for nonce in (1, 2)])
OTHERS = json.dumps([{"nonce": nonce, "vector": "AAAA"} for nonce in (1, 2, 3)])


class ConfigMaps:
    """A store of one ConfigMap, which counts how often it is read."""

    def __init__(self) -> None:
        self.version, self.entry = 1, cast("str | None", PROOFS)
        self.reads = 0

    async def config_map_entry(self, *_: str) -> tuple[str, str | None]:
        """Return the version and the entry."""
        self.reads += 1
        return str(self.version), self.entry


class Asked:
    """A validation's planner, its ConfigMap, and how often that was parsed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.maps, self.parsed = ConfigMaps(), 0
        log = cast(ObjectLogger, None)
        sources = Sources(store=cast(ObjectStore, self.maps))
        self.planner = ValidationPlanner(sources, ObjectRef("ns", "v", UID), log)
        parse = validations.parse_proofs

        def counting(*arguments: Any) -> Any:  # noqa: ANN401
            self.parsed += 1
            return parse(*arguments)

        monkeypatch.setattr(kinds, "parse_proofs", counting)

    async def proofs(self) -> object:
        """Ask once, and return what the plan sees."""
        work: PoCValidation = a_validation()
        await self.planner.ask(work)
        found = self.planner._proofs
        return found if isinstance(found, str) else [one.nonce for one in found]


async def test_a_config_map_is_read_once_for_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert [await asked.proofs() for _ in range(5)] == [[1, 2]] * 5
    assert (asked.maps.reads, asked.parsed) == (1, 1)


async def test_it_is_parsed_again_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "PROOFS_SECONDS", 0.0)
    asked = Asked(monkeypatch)
    assert [await asked.proofs() for _ in range(3)] == [[1, 2]] * 3
    assert (asked.maps.reads, asked.parsed) == (3, 1)
    asked.maps.version, asked.maps.entry = 2, OTHERS
    assert await asked.proofs() == [1, 2, 3]
    assert asked.parsed == 2


async def test_what_is_missing_is_looked_for_at_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    asked.maps.entry = None
    assert "does not exist" in str(await asked.proofs())
    asked.maps.version, asked.maps.entry = 2, PROOFS
    assert await asked.proofs() == [1, 2]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (RoundPlanner, a_round),
        (ValidationPlanner, partial(a_validation, proofs={"inline": json.loads(PROOFS)})),
        (CalibrationPlanner, a_calibration),
    ],
    ids=["round", "validation", "calibration"],
)
async def test_no_kind_ends_because_a_round_has_its_pods(kind: type[Planner[Any]], make: Callable[..., Any]) -> None:
    planner = kind(Sources(store=cast(ObjectStore, None)), ObjectRef("ns", "r", UID), cast(ObjectLogger, None))
    work = make(startDeadlineSeconds=LIMIT)
    await planner.ask(work)
    for seconds in (0, 2 * LIMIT):
        seen = Snapshot(
            work=work,
            pods=[a_pod("a")],
            reports={"a": COMPUTES_FIRST},
            now=NOW + timedelta(seconds=seconds),
            find_other_rounds=lambda: [FIRST],
        )
        status = planner.plan(seen).status
        assert (status.outcome, status.idle_time) == (None, None)
        work = work.model_copy(update={"status": status})
