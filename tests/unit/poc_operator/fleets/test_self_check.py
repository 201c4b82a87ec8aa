# SPDX-License-Identifier: Apache-2.0
"""Who computes something else: the comparison, and what holds of it in whatever order pods answer."""

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poc_operator.apis.v1alpha1.validation import StatTest
from poc_operator.fleets.self_check import (
    Check,
    Vectors,
    compare,
    is_incomplete,
    judge,
    lacks,
    packed,
    unpacked,
)
from vllm_poc.wire.answers import ModelLimits
from vllm_poc.wire.artifacts import encode_vector
from vllm_poc.wire.generate import GeneratedResponse
from vllm_poc.wire.messages import Protocol

THRESHOLDS = StatTest().thresholds(Protocol.ARTIFACT)
K_DIM = 12
NONCES = 32


def engine(seed: int, *, noise: float = 0.0, pod: int = 0, nonces: int = NONCES) -> Vectors:
    """What an engine computes: unit vectors of its own, on a pod that rounds them in its own way."""
    values, rounding = Random(seed), Random(pod)  # noqa: S311 - to be the same each time
    return [_unit([values.gauss(0, 1) for _ in range(K_DIM)], noise, rounding) for _ in range(nonces)]


def _unit(vector: Sequence[float], noise: float, rounding: Random) -> Sequence[float]:
    length = math.hypot(*vector)
    off = [rounding.gauss(0, 1) for _ in vector]
    return [value / length + noise * error / math.hypot(*off) for value, error in zip(vector, off, strict=True)]


def response(vectors: Mapping[int, Sequence[float]], missing: Sequence[int] = ()) -> GeneratedResponse:
    artifacts: Any = [{"nonce": nonce, "vector_b64": encode_vector(vector)} for nonce, vector in vectors.items()]
    return GeneratedResponse(request_id="1", artifacts=artifacts, not_computed=list(missing))


CHECK = Check(model="org/model", seq_len=8, k_dim=2, nonces=3)
ONE = (0.5, 1.0)


def test_a_pod_is_asked_for_the_same_nonces_of_the_same_block_as_every_other() -> None:
    request = CHECK.request("served", beside_round=True)
    assert (request.nonces, request.wait, request.beside_round) == ([0, 1, 2], True, True)
    assert request.params is not None
    assert (request.params.model, request.params.seq_len, request.params.k_dim) == ("served", 8, 2)
    other = Check(model="other", seq_len=8, k_dim=2, nonces=3).request("served", beside_round=True)
    assert other == request
    assert CHECK.name == "org/model seqLen=8 kDim=2 nonces=3"


def test_an_answer_is_read_in_the_order_of_nonces() -> None:
    two = (-0.5, 0.25)
    assert CHECK.vectors(response({2: two, 0: ONE}, missing=[1])) == [ONE, None, two]


@pytest.mark.parametrize(
    "answer",
    [
        response({0: ONE, 1: ONE}),
        response({0: ONE, 1: ONE, 3: ONE}),
        response({0: ONE, 1: ONE, 2: (1.0,)}),
        response({}),
        GeneratedResponse(request_id="1", nonces=[0, 1, 2], distances=[1.0, 1.0, 1.0]),
    ],
    ids=["too few", "others", "another length", "nothing", "distances"],
)
def test_what_is_no_answer_to_the_question_is_refused(answer: GeneratedResponse) -> None:
    with pytest.raises(ValueError, match=r"nonces that it was asked for|k_dim 2 takes 4"):
        CHECK.vectors(answer)


@given(st.lists(st.none() | st.tuples(*[st.floats(-1, 1, width=16)] * 2), min_size=1, max_size=40))
def test_stored_vectors_are_what_they_were(vectors: Vectors) -> None:
    assert unpacked(packed(vectors, 2), 2) == list(vectors)


@pytest.mark.parametrize("text", ["", "no base64", packed([ONE], 2)[:-4] + "AAA="])
def test_what_are_no_vectors_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpacked(text, 2)


def test_the_default_vectors_take_a_kibibyte() -> None:
    assert len(packed(engine(1), K_DIM)) == 1024


@pytest.mark.parametrize(("wrong", "failed"), [(0, False), (7, True), (6, False), (32, True)])
def test_the_network_decides_by_the_number_of_mismatches(wrong: int, failed: bool) -> None:
    reference, other = engine(1), engine(2)
    found = compare([*other[:wrong], *reference[wrong:]], reference, THRESHOLDS)
    assert (found.mismatches, found.total, found.failed) == (wrong, 32, failed)
    assert found.failed is (found.p_value < 0.05)


def test_nonces_without_a_result_leave_the_sample() -> None:
    vectors = [None, None, *engine(1)[2:]]
    assert (lacks(vectors), is_incomplete(vectors)) == (2, False)
    assert compare(vectors, engine(1), THRESHOLDS).total == 30
    assert compare(engine(1), vectors, THRESHOLDS).total == 30
    assert is_incomplete([None] * 4 + [ONE] * 28)
    assert not is_incomplete([None] + [ONE] * 7)


def test_alone_a_pod_has_nothing_to_be_compared_with() -> None:
    found = judge({"a": engine(1)}, None, THRESHOLDS)
    assert (found.source, found.reference, found.results["a"].failed) == ("a", engine(1), False)


def test_of_two_that_differ_the_one_that_was_first_counts() -> None:
    found = judge({"a": engine(2), "b": engine(1)}, engine(1), THRESHOLDS)
    assert found.source is None
    assert [pod for pod, result in found.results.items() if result.failed] == ["a"]


@pytest.mark.parametrize(("standing", "replaced"), [(0, True), (1, True), (2, False), (5, False)])
def test_most_pods_must_disagree_with_the_reference_to_replace_it(standing: int, replaced: bool) -> None:
    answers = {"a": engine(2), "b": engine(2, noise=0.05), "c": engine(2, noise=0.1)}
    if standing == 2:
        del answers["c"]
    found = judge(answers, engine(1), THRESHOLDS, standing=standing)
    assert (found.source is not None) is replaced
    assert all(result.failed is not replaced for result in found.results.values())


def test_what_somebody_has_measured_is_not_outvoted() -> None:
    answers = {"a": engine(2), "b": engine(2), "c": engine(2)}
    found = judge(answers, engine(1), THRESHOLDS, fixed=True)
    assert (found.source, found.reference) == (None, engine(1))
    assert all(result.failed for result in found.results.values())


def test_many_pods_that_all_differ_are_judged_soon() -> None:
    found = judge({f"p{n:03}": engine(n) for n in range(300)}, engine(999), THRESHOLDS)
    assert found.source is None


Votes = dict[str, Vectors]


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Votes, set[str]]:
    """Pods of which more than half compute the same, and the names of the others, some of which agree too."""
    honest = draw(st.integers(2, 6))
    wrong = draw(st.lists(st.integers(2, 4), max_size=honest - 1))
    noise = draw(st.sampled_from([0.0, 0.01, 0.15]))
    engines = draw(st.permutations([1] * honest + wrong))
    votes = {f"p{n}": engine(seed, noise=noise, pod=n) for n, seed in enumerate(engines)}
    return votes, {f"p{n}" for n, seed in enumerate(engines) if seed != 1}


def one_by_one(votes: Votes, order: Sequence[str]) -> set[str]:
    """Let pods answer in this order; return those that fail in the end."""
    reference: Vectors | None = None
    failing = set[str]()
    for count in range(1, len(order) + 1):
        found = judge({pod: votes[pod] for pod in order[:count]}, reference, THRESHOLDS)
        reference = unpacked(packed(found.reference, K_DIM), K_DIM)  # as it is stored
        failing = {pod for pod, result in found.results.items() if result.failed}
        assert len(failing) < count, "the pod of the reference passes"
    return failing


@settings(deadline=None, max_examples=60)
@given(fleets(), st.data())
def test_in_any_order_those_fail_that_most_disagree_with(case: tuple[Votes, set[str]], data: st.DataObject) -> None:
    votes, wrong = case
    assert one_by_one(votes, data.draw(st.permutations(list(votes)))) == wrong
    assert {pod for pod, result in judge(votes, None, THRESHOLDS).results.items() if result.failed} == wrong


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 8), st.data())
def test_one_wrong_pod_of_three_or_more_fails_alone(pods: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, pods - 1))
    votes = {f"p{n}": engine(2 if n == wrong else 1, noise=0.1, pod=n) for n in range(pods)}
    assert one_by_one(votes, data.draw(st.permutations(list(votes)))) == {f"p{wrong}"}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 5))
def test_what_is_decided_stays_decided(engines: list[int], before: int, standing: int) -> None:
    """With the reference that it has made, a second look at the same answers changes nothing."""
    votes = {f"p{n}": engine(seed) for n, seed in enumerate(engines)}
    first = judge(votes, engine(before), THRESHOLDS, standing=standing)
    again = judge(votes, first.reference, THRESHOLDS, standing=0 if first.source else standing)
    assert again.source is None
    assert again.results == first.results


@pytest.mark.parametrize(
    ("tokens", "sequences", "seq_len", "batch"),
    [
        (8192, 512, 1024, 8),
        (32_768, 16, 1024, 16),
        (131_072, 512, 1024, 32),
        (131_072, 512, 64, 32),
        (512, 16, 1024, 1),
        (0, 0, 1024, 0),
    ],
    ids=["tokens", "sequences", "as asked for", "short", "too long", "unknown"],
)
def test_how_many_nonces_a_forward_pass_has(tokens: int, sequences: int, seq_len: int, batch: int) -> None:
    check = Check(model="org/model", seq_len=seq_len, k_dim=K_DIM, nonces=100)
    assert check.batch(ModelLimits(max_batch_tokens=tokens, max_batch_nonces=sequences)) == batch
    assert check.request("org/model", beside_round=False).batch_size == 32
