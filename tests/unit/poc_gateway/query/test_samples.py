# SPDX-License-Identifier: Apache-2.0
"""Samples of proofs for a validating round."""

import pytest
from httpx import AsyncClient
from pydantic import TypeAdapter

from poc_gateway.query import summary
from poc_gateway.store.database import Database
from poc_operator.apis.v1alpha1.validation import Proof
from poc_operator.validations.plan import parse_proofs
from tests.support.builders.deliveries import a_round, encoded
from tests.support.builders.stored import distance, store
from vllm_poc.wire.messages import Protocol

ROUND = "/rounds/ns/round-uid-1"
DISTANCES = {"rTarget": "1.4"}
_PROOFS = TypeAdapter(list[Proof])


async def sample(client: AsyncClient, nonces: int, seed: str = "a") -> list[Proof]:
    answer = await client.get(f"{ROUND}/sample", params={"nonces": nonces, "seed": seed})
    assert answer.status_code == 200, answer.text
    return _PROOFS.validate_json(answer.content)


async def test_a_sample_is_even_distinct_and_drawn_again_by_its_seed(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(nodes=3), [nonce for nonce in range(600) if nonce % 3 < 2 or nonce < 9])
    proofs = await sample(client, 43)
    nonces = [proof.nonce for proof in proofs]
    assert len(set(nonces)) == 43
    assert sorted(sum(nonce % 3 == slot for nonce in nonces) for slot in range(3)) == [3, 20, 20]
    assert all(proof.vector == encoded(proof.nonce) for proof in proofs)
    assert await sample(client, 43) == proofs
    assert await sample(client, 43, "b") != proofs


async def test_a_sample_of_long_vectors_is_smaller(
    database: Database, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "SAMPLE_BYTES", 10 * 2 * 64 + 1)
    await store(database, a_round(artifact={"kDim": 64}), range(50))
    assert len(await sample(client, 43)) == 10


async def test_gaps_cost_no_proof(database: Database, client: AsyncClient) -> None:
    held = [0, 1, 2, 900_000, 900_001, 1_000_000]
    await store(database, a_round(), held)
    for nonces in range(1, 6):
        drawn = [proof.nonce for proof in await sample(client, nonces)]
        assert len(set(drawn)) == nonces
        assert set(drawn) <= set(held)
    assert [proof.nonce for proof in await sample(client, 50)] == held


async def test_a_sample_is_what_a_validating_round_reads(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(**DISTANCES), range(100))
    text = (await client.get(f"{ROUND}/sample", params={"nonces": 10, "seed": "x"})).text
    proofs = parse_proofs("here", text, Protocol.DISTANCE)
    assert not isinstance(proofs, str), proofs
    assert [float(proof.distance or "") for proof in proofs] == [distance(proof.nonce) for proof in proofs]


async def test_without_a_seed_the_sample_is_always_the_same(database: Database, client: AsyncClient) -> None:
    await store(database, a_round(), range(1000))
    assert (await client.get(f"{ROUND}/sample")).json() == (await client.get(f"{ROUND}/sample?seed=")).json()
