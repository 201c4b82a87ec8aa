# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_poc.wire.stat_test import (
    ChainComparison,
    StatTest,
    allows_verdict,
    compare_chain,
    effective_tau,
    most_missing,
)

chains = st.lists(st.integers(min_value=0, max_value=15), max_size=40)
margins = st.floats(min_value=0, max_value=2)


@given(chain=chains)
def test_an_equal_chain_never_mismatches(chain: list[int]) -> None:
    found = compare_chain(chain, [1.0] * len(chain), chain)
    assert found == ChainComparison(len(chain), 0, 0.0)
    assert not found.is_mismatch(0.0)


@given(points=chains, claims=st.lists(st.integers(min_value=-5, max_value=300), max_size=40), data=st.data())
def test_only_disagreeing_steps_that_both_have_count(points: list[int], claims: list[int], data: st.DataObject) -> None:
    gaps = data.draw(st.lists(margins, min_size=len(points), max_size=len(points)))
    apart = [gap for own, gap, claim in zip(points, gaps, claims, strict=False) if own != claim]
    found = compare_chain(points, gaps, claims)
    assert found == ChainComparison(min(len(points), len(claims)), len(apart), max(apart, default=0.0))


def test_the_margin_has_to_lie_above_tau() -> None:
    found = compare_chain([1, 2], [0.0, 0.025], [1, 3])
    assert found is not None
    assert not found.is_mismatch(0.025)
    assert found.is_mismatch(math.nextafter(0.025, 0))


def test_a_disagreement_at_an_exact_tie_is_no_mismatch() -> None:
    assert compare_chain([4], [0.0], [5]) == ChainComparison(1, 1, 0.0)
    assert not ChainComparison(1, 1, 0.0).is_mismatch(0.0)


@pytest.mark.parametrize("points", [[-1, 3], [3, 3, -1]])
def test_a_step_that_was_not_finite_takes_its_nonce_out(points: list[int]) -> None:
    assert compare_chain(points, [0.5] * len(points), [3, 3]) is None


def test_missing_margins_are_named() -> None:
    with pytest.raises(ValueError, match="margins has 1 steps, but 2 are compared"):
        compare_chain([1, 2], [0.0], [1, 2, 3])


@pytest.mark.parametrize(("requested", "most"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (200, 20), (209, 20)])
def test_a_tenth_may_be_missing(requested: int, most: int) -> None:
    assert most_missing(requested) == most == max(1, math.floor(0.1 * requested))
    assert allows_verdict(requested=requested, compared=requested - most) is (requested > most)
    assert not allows_verdict(requested=requested, compared=requested - most - 1)


def test_there_is_no_verdict_where_nothing_was_compared() -> None:
    assert not allows_verdict(requested=1, compared=0)
    assert allows_verdict(requested=2, compared=1)


def test_tau_depends_on_whether_a_test_was_sent() -> None:
    assert effective_tau(None) == 0.025
    assert effective_tau(StatTest()) == 0.02
    assert effective_tau(StatTest(dist_threshold=0.4)) == 0.4
