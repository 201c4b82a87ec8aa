# SPDX-License-Identifier: Apache-2.0
"""What a validation reads for its plan: its ConfigMap, now and then, and parsed when it has changed."""

import json
from typing import Any, cast

import pytest

from poc_operator.apis.v1alpha1.validation import PoCValidation
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller import kinds
from poc_operator.controller.kinds import Sources, ValidationPlanner
from poc_operator.controller.logs import ObjectLogger, ObjectRef
from poc_operator.validations import plan as validations
from tests.unit.poc_operator.build import UID, a_validation

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
