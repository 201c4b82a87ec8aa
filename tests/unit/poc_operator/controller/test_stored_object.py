# SPDX-License-Identifier: Apache-2.0
"""What a turn begins from: the newest that the API server told, without asking it."""

from collections.abc import Mapping
from typing import Any, cast

import pytest

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import StoreUnavailable, UnreadableObject
from poc_operator.clients.kube.objects import ObjectStore
from poc_operator.controller.event_loop import Computing
from poc_operator.controller.logs import ObjectRef
from poc_operator.controller.stored_object import READ_SECONDS, ObjectReader
from tests.unit.poc_operator.build import UID, a_round


def version(number: int, **metadata: Any) -> PoCRound:  # noqa: ANN401
    """The round, changed so many times."""
    round_ = a_round()
    changed = round_.metadata.model_copy(update={"resource_version": str(number), "generation": number, **metadata})
    return round_.model_copy(update={"metadata": changed})


def body(round_: PoCRound) -> dict[str, Any]:
    """The round as a watch tells of it."""
    return round_.model_dump(mode="json", by_alias=True, exclude_none=True)


class Reading:
    """A reader, the API server's round, how often that was asked for, and a clock."""

    def __init__(self, stored: PoCRound | None) -> None:
        self.stored, self.gets, self.seconds = stored, 0, 1000.0
        self.reader = ObjectReader(
            PoCRound, ObjectRef("ns", "r", UID), cast(ObjectStore, self), lambda: self.seconds, Computing()
        )

    async def get(self, *_: object) -> PoCRound | None:
        """Return the round."""
        self.gets += 1
        return self.stored

    async def read(self) -> int | None:
        """Return the version of what the next turn begins from."""
        found = await self.reader.read()
        return None if found is None else int(found.metadata.resource_version)

    def tell(self, told: Mapping[str, Any]) -> None:
        """Let the watch tell."""
        self.reader.tell(told)


async def test_what_the_watch_tells_needs_no_request() -> None:
    reading = Reading(version(9))
    reading.tell(body(version(3)))
    assert [await reading.read() for _ in range(3)] == [3, 3, 3]
    reading.tell(body(version(10)))
    assert await reading.read() == 10
    assert reading.gets == 0


async def test_without_a_watch_it_is_read_once() -> None:
    reading = Reading(version(9))
    assert [await reading.read() for _ in range(3)] == [9, 9, 9]
    assert reading.gets == 1


@pytest.mark.parametrize("told", [1, 99, 100])
async def test_what_was_written_is_not_undone_by_a_watch_that_is_late(told: int) -> None:
    """As texts, version 99 is later than version 100."""
    reading = Reading(None)
    reading.tell(body(version(98)))
    await reading.read()
    reading.reader.remember(version(100))
    reading.tell(body(version(told)))
    assert await reading.read() == 100
    reading.tell(body(version(101)))
    assert await reading.read() == 101
    assert reading.gets == 0


async def test_what_must_be_read_is_read() -> None:
    reading = Reading(version(12))
    reading.tell(body(version(10)))
    await reading.read()
    reading.reader.forget()
    assert await reading.read() == 12
    reading.reader.remember(None)
    reading.stored = None
    assert await reading.read() is None
    assert reading.gets == 2


async def test_a_watch_that_tells_nothing_is_not_relied_on_for_ever() -> None:
    reading = Reading(version(12))
    reading.tell(body(version(10)))
    assert await reading.read() == 10
    reading.seconds += READ_SECONDS
    assert [await reading.read() for _ in range(3)] == [12, 12, 12]
    assert reading.gets == 1


@pytest.mark.parametrize("told", [True, False], ids=["told", "read"])
async def test_another_object_of_the_name_is_none(told: bool) -> None:
    reading = Reading(version(12, uid="another"))
    if told:
        reading.tell(body(version(12, uid="another")))
    assert await reading.read() is None


async def test_what_cannot_be_understood_is_not_taken_for_what_it_was() -> None:
    reading = Reading(version(12))
    reading.tell(body(version(10)))
    await reading.read()
    reading.tell({**body(version(11)), "spec": {}})
    with pytest.raises(UnreadableObject):
        await reading.read()
    assert await reading.read() == 12, "it is read then"


async def test_a_request_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(version(12))

    async def failing(*_: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(reading, "get", failing)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await reading.read()
    assert await reading.read() == 12
