# SPDX-License-Identifier: Apache-2.0
"""Lists of proofs: what is wrong with one is told with its place."""

import pytest

from poc_operator.apis.v1alpha1.validation import Proof
from poc_operator.validations.plan import digest, in_order, parse_proofs
from vllm_poc.wire.messages import Protocol


@pytest.mark.parametrize("nonce", [-1, 2**31])
def test_a_proof_beyond_int32_is_refused_with_its_place(nonce: int) -> None:
    found = parse_proofs("key", f'[{{"nonce": {nonce}, "distance": "1"}}]', Protocol.DISTANCE)
    assert isinstance(found, str)
    assert "0.nonce: Input should be" in found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "claims does not exist: put a JSON list of proofs there"),
        ("[]", "claims has no proof"),
        ("{}", "claims is not a JSON list of proofs"),
        ('[{"nonce": 1, "vector": "AAAA"}]', "claims: nonce 1 has no distance"),
        ('[{"nonce": 1, "distance": "1"}, {"nonce": 1, "distance": "1"}]', "claims names a nonce twice"),
        ('[{"nonce": 1, "distance": "nan"}]', "claims is not a JSON list of proofs: 0.distance"),
    ],
)
def test_what_is_wrong_is_told(text: str | None, told: str) -> None:
    found = parse_proofs("claims", text, Protocol.DISTANCE)
    assert isinstance(found, str)
    assert found.startswith(told)


def test_proofs_in_another_order_are_the_same() -> None:
    proofs = [Proof(nonce=nonce, vector="AAAA") for nonce in (3, 1, 2)]
    assert digest(in_order(proofs)) == digest(in_order(proofs[::-1]))
    assert [proof.nonce for proof in in_order(proofs)] == [1, 2, 3]


def test_proofs_are_read() -> None:
    found = parse_proofs("claims", '[{"nonce": 7, "distance": "1.3"}]', Protocol.DISTANCE)
    assert not isinstance(found, str)
    assert [(proof.nonce, proof.distance) for proof in found] == [(7, "1.3")]
