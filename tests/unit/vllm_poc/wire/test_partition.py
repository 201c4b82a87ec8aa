# SPDX-License-Identifier: Apache-2.0
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.builders.known_answers import ANSWERS, label
from vllm_poc.wire.partition import MAX_NONCE, NonceSlot


@st.composite
def slots(draw: st.DrawFn) -> NonceSlot:
    node_count = draw(st.integers(min_value=1, max_value=10_000))
    n_groups = draw(st.integers(min_value=1, max_value=1_000))
    return NonceSlot(
        node_id=draw(st.integers(min_value=0, max_value=node_count - 1)),
        node_count=node_count,
        group_id=draw(st.integers(min_value=0, max_value=n_groups - 1)),
        n_groups=n_groups,
    )


@pytest.mark.parametrize("entry", ANSWERS["nonce_partition"], ids=label)
def test_nonces(entry: dict[str, Any]) -> None:
    expected = entry["first8"]
    slot = NonceSlot.model_validate({key: value for key, value in entry.items() if key != "first8"})
    assert slot.nonces(0, 8) == expected
    assert slot.nonces(3, 5) == expected[3:]


@given(node_count=st.integers(1, 6), n_groups=st.integers(1, 6))
def test_the_slots_of_a_round_are_disjoint_and_cover_everything(node_count: int, n_groups: int) -> None:
    classes = [
        set(NonceSlot(node_id=i, node_count=node_count, group_id=g, n_groups=n_groups).nonces(0, 20))
        for i in range(node_count)
        for g in range(n_groups)
    ]
    assert not any(a & b for a, b in combinations(classes, 2))
    assert set().union(*classes) == set(range(20 * node_count * n_groups))


@given(slot=slots(), index=st.integers(min_value=0, max_value=10**6))
def test_index_undoes_nonce(slot: NonceSlot, index: int) -> None:
    assert slot.index(slot.nonce(index)) == index


@given(slot=slots())
def test_the_slot_ends_with_the_int32_range(slot: NonceSlot) -> None:
    assert slot.nonce(slot.capacity - 1) <= MAX_NONCE < slot.nonce(slot.capacity)
    assert slot.nonces(slot.capacity - 1, 5) == [slot.nonce(slot.capacity - 1)]
    assert slot.nonces(slot.capacity, 5) == []


@given(slot=slots(), other=st.integers(min_value=0, max_value=MAX_NONCE))
def test_foreign_nonces_have_no_index(slot: NonceSlot, other: int) -> None:
    if other < slot.offset or other % slot.stride != slot.offset % slot.stride:
        with pytest.raises(ValueError, match="is not in the slot"):
            slot.index(other)
    else:
        assert slot.nonce(slot.index(other)) == other


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((1, 1, 0, 1), "node_id 1 must be below node_count 1"),
        ((0, 1, 2, 2), "group_id 2 must be below n_groups 2"),
        ((0, 0, 0, 1), "node_count"),
        ((-1, 1, 0, 1), "node_id"),
    ],
)
def test_impossible_slots_are_refused(ids: tuple[int, int, int, int], message: str) -> None:
    node_id, node_count, group_id, n_groups = ids
    with pytest.raises(ValidationError, match=message):
        NonceSlot(node_id=node_id, node_count=node_count, group_id=group_id, n_groups=n_groups)
