# SPDX-License-Identifier: Apache-2.0
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.known_answers import ANSWERS, label
from vllm_poc.wire.artifacts import decode_vector
from vllm_poc.wire.stat_test import is_fraud, is_mismatch, p_value

COMPUTED = decode_vector(ANSWERS["validation_cases"]["computed_b64"], ANSWERS["validation_cases"]["k_dim"])


def exact_tail(k: int, n: int, p: float) -> Fraction:
    probability = Fraction(p)
    return sum(
        (math.comb(n, i) * probability**i * (1 - probability) ** (n - i) for i in range(k, n + 1)),
        start=Fraction(0),
    )


@pytest.mark.parametrize("entry", ANSWERS["fraud_test"], ids=label)
def test_fraud_test(entry: dict[str, Any]) -> None:
    mismatch, total, p = entry["n_mismatch"], entry["n_total"], entry["p_mismatch"]
    assert p_value(mismatch, total, p) == pytest.approx(entry["p_value"], rel=1e-7)
    for threshold in (0.01, 0.05):
        flagged = is_fraud(mismatch, total, p_mismatch=p, fraud_threshold=threshold)
        assert flagged is entry[f"fraud_at_{threshold}"]


@pytest.mark.parametrize("entry", ANSWERS["fraud_min_mismatch"], ids=label)
def test_fewest_mismatches_that_flag(entry: dict[str, Any]) -> None:
    total, p, threshold = entry["n_total"], entry["p_mismatch"], entry["threshold"]
    flags = [is_fraud(n, total, p_mismatch=p, fraud_threshold=threshold) for n in range(entry["min_mismatch"] + 1)]
    assert flags == [False] * entry["min_mismatch"] + [True]


@given(
    n=st.integers(min_value=1, max_value=200),
    p=st.floats(min_value=1e-6, max_value=1 - 1e-6),
    data=st.data(),
)
def test_tail_agrees_with_exact_fractions(n: int, p: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(min_value=0, max_value=n))
    assert p_value(k, n, p) == pytest.approx(float(exact_tail(k, n, p)), rel=1e-8, abs=1e-300)


@pytest.mark.parametrize(("k", "n", "p"), [(5, 100_000, 1e-5), (50_500, 100_000, 0.5), (49_000, 100_000, 0.5)])
def test_tail_of_large_samples(k: int, n: int, p: float) -> None:
    binom = pytest.importorskip("scipy.stats", reason="scipy is not installed").binom
    assert p_value(k, n, p) == pytest.approx(binom.sf(k - 1, n, p), rel=1e-8)


def test_tail_falls_with_more_mismatches() -> None:
    tail = [p_value(k, 50, 0.1) for k in range(51)]
    assert tail == sorted(tail, reverse=True)
    assert tail[0] == 1.0


@pytest.mark.parametrize(("p", "expected"), [(0.0, 0.0), (1.0, 1.0)])
def test_tail_of_certain_events(p: float, expected: float) -> None:
    assert p_value(3, 5, p) == expected


@pytest.mark.parametrize(
    ("k", "n", "p", "message"),
    [
        (3, 2, 0.1, "n_mismatch 3 must lie in 0..n_total, which is 2"),
        (-1, 2, 0.1, "n_mismatch -1"),
        (1, 2, 1.5, "p_mismatch 1.5 must lie in 0..1"),
        (1, 2, float("nan"), "p_mismatch nan"),
    ],
)
def test_impossible_counts_are_refused(k: int, n: int, p: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        p_value(k, n, p)


@pytest.mark.parametrize("case", ANSWERS["validation_cases"]["cases"], ids=label)
def test_comparison_of_vectors(case: dict[str, Any]) -> None:
    for threshold in (0.02, 0.2, 0.4):
        expected = case[f"mismatch_at_{threshold}"]
        assert is_mismatch(COMPUTED, case["received_b64"], threshold) is expected
    if case["l2"] is not None:
        received = decode_vector(case["received_b64"], len(COMPUTED))
        assert math.dist(COMPUTED, received) == pytest.approx(case["l2"], abs=1e-6)


@pytest.mark.parametrize("received", ["", "not base64", "AAAA", "irHftxSv"])
def test_what_does_not_decode_is_a_mismatch(received: str) -> None:
    assert is_mismatch(COMPUTED, received, 2.0)


def test_the_threshold_itself_still_matches() -> None:
    assert not is_mismatch([0.5], "ADw=", 0.5)  # the received number is 1
    assert is_mismatch([0.5], "ADw=", 0.499)


def test_a_sick_recomputation_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="leave its nonce out of the sample"):
        is_mismatch([float("nan")], "ADw=", 0.02)
