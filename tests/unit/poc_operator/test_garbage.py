# SPDX-License-Identifier: Apache-2.0
"""How often the operator's process looks for garbage."""

import gc
from collections.abc import Iterator

import pytest

from poc_operator.__main__ import collect_garbage_rarely

#: More than a turn of the largest round makes.
OBJECTS = 500_000


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def full_collections() -> int:
    return gc.get_stats()[2]["collections"]  # type: ignore[no-any-return]  # as typeshed has it


def searches() -> int:
    """How often all objects have been searched through."""
    gc.collect()
    before = full_collections()
    made = [[number] for number in range(OBJECTS)]
    assert len(made) == OBJECTS
    return full_collections() - before


def test_a_turn_does_not_search_through_all_objects() -> None:
    assert searches() > 0, "as Python does by default"
    collect_garbage_rarely()
    assert searches() == 0
