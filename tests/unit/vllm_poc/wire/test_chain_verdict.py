# SPDX-License-Identifier: Apache-2.0
"""The decode scheme on the wire: parameters, leaves, and the verdict over chains."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_poc.wire.artifacts import Artifact, chain_artifact, chain_bytes
from vllm_poc.wire.callbacks import GeneratedArtifacts
from vllm_poc.wire.chain_verdict import NonceVerdict, NoVerdictError, chain_verdict
from vllm_poc.wire.generate import GenerateRequest
from vllm_poc.wire.messages import ArtifactParams, InitGenerateRequest, Protocol
from vllm_poc.wire.stat_test import StatTest, compare_chain, effective_test, tau_warning

STEPS = 256
#: As the network's node sends it, byte by byte.
START = (
    b'{"block_hash":"abc","block_height":7,"public_key":"02a1","node_id":0,"node_count":1,'
    b'"params":{"model":"org/model","seq_len":256,"decode":true,"max_tokens":256},"url":"http://node:9100/v2",'
    b'"poc_stronger_rng":true}'
)
#: As the network's pod sends it.
CALLBACK = (
    b'{"public_key":"02a1","block_hash":"abc","block_height":7,"node_id":0,'
    b'"artifacts":[{"nonce":4,"vector_b64":"","k_points_steps":[1,15,13]}],'
    b'"encoding":{"dtype":"f16","k_dim":12,"endian":"le"}}'
)
chains = st.lists(st.integers(0, 15), min_size=STEPS + 1, max_size=STEPS + 1)


def test_the_networks_start_is_understood_and_passed_on_as_it_came() -> None:
    request = InitGenerateRequest.model_validate_json(START)
    assert (request.protocol, request.max_tokens) == (Protocol.DECODE, 256)
    assert request.layer_hooks
    assert not request.sign_flips
    params = {"model": "org/model", "seq_len": 256, "k_dim": 12, "decode": True, "max_tokens": 256}
    assert request.model_dump(mode="json")["params"] == params
    assert InitGenerateRequest.model_validate_json(request.model_dump_json()).protocol is Protocol.DECODE


@pytest.mark.parametrize("more", [{}, {"decode": False}, {"scheme": "prefill"}, {"max_tokens": 0}])
def test_parameters_of_prefill_are_passed_on_without_a_word_of_decode(more: dict[str, Any]) -> None:
    params = ArtifactParams.model_validate({"model": "tiny", "seq_len": 64} | more)
    assert json.loads(params.model_dump_json()) == {"model": "tiny", "seq_len": 64, "k_dim": 12}


def test_another_number_of_steps_is_other_work() -> None:
    one = InitGenerateRequest.model_validate_json(START)
    other = InitGenerateRequest.model_validate_json(START.replace(b'"max_tokens":256', b'"max_tokens":255'))
    prefill = InitGenerateRequest.model_validate_json(START.replace(b',"decode":true,"max_tokens":256', b""))
    assert one.same_work(one)
    assert not one.same_work(other)
    assert not one.same_work(prefill)


def test_the_networks_callback_is_read_and_written_byte_by_byte() -> None:
    assert GeneratedArtifacts.model_validate_json(CALLBACK).model_dump_json(exclude_none=True).encode() == CALLBACK


@given(chains)
def test_a_leaf_is_its_chain(chain: list[int]) -> None:
    leaf = chain_bytes(chain, STEPS)
    assert len(leaf) == STEPS + 1
    assert chain_artifact(3, leaf) == Artifact(nonce=3, vector_b64="", k_points_steps=chain)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (None, "k_points_steps is missing"),
        ([], "k_points_steps is missing"),
        ([1, 2], "has 2 steps, but max_tokens 2 takes 3"),
        ([1, 2, 3, 4], "has 4 steps"),
        ([1, 16, 3], "holds 16 at step 1"),
        ([1, 2, 300], "holds 300 at step 2"),
        ([-1, 2, 3], "holds -1 at step 0"),
    ],
)
def test_what_is_no_leaf_is_named(chain: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_bytes(chain, 2)


def compared(nonce: int, points: list[int], claims: list[int], margins: list[float], tau: float) -> NonceVerdict:
    found = compare_chain(points, margins, claims)
    assert found is not None
    return NonceVerdict.of(nonce, found, tau)


def test_the_verdict_is_over_what_was_compared() -> None:
    test = StatTest(dist_threshold=0.05, p_mismatch=0.001, fraud_threshold=0.01)
    honest = [compared(nonce, [1, 2], [1, 2], [0.0, 0.0], 0.05) for nonce in range(18)]
    found = [*honest, compared(18, [1, 2], [1, 3], [0.0, 0.3], 0.05)]
    verdict = chain_verdict(range(20), found, test)
    assert (verdict.n_total, verdict.mismatch_nonces, verdict.excluded_nonces) == (19, [18], [19])
    assert (verdict.n_excluded, verdict.not_computed, verdict.warning) == (1, [19], None)
    assert verdict.p_value == pytest.approx(1 - 0.999**19)
    assert not verdict.fraud_detected


@pytest.mark.parametrize(
    ("requested", "missing", "votes"), [(200, 20, True), (200, 21, False), (1, 1, False), (2, 1, True)]
)
def test_too_few_comparisons_are_no_vote(requested: int, missing: int, votes: bool) -> None:
    found = [compared(nonce, [1], [1], [0.0], 0.02) for nonce in range(requested - missing)]
    if votes:
        assert chain_verdict(range(requested), found, StatTest()).n_excluded == missing
    else:
        with pytest.raises(NoVerdictError, match="validation aborted"):
            chain_verdict(range(requested), found, StatTest())


def test_a_tau_that_was_never_set_is_warned_of() -> None:
    assert tau_warning(0.399) is None
    assert "0.4" in (tau_warning(0.4) or "")
    assert effective_test(None).dist_threshold == 0.025
    found = [compared(0, [1], [2], [0.39], 0.4)]
    verdict = chain_verdict([0], found, StatTest(dist_threshold=0.4))
    assert (verdict.n_mismatch, verdict.warning) == (0, tau_warning(0.4))


def a_request(**more: Any) -> GenerateRequest:  # noqa: ANN401
    params = {"model": "tiny", "seq_len": 256, "decode": True, "max_tokens": 2}
    about = {"block_hash": "b", "block_height": 1, "public_key": "k", "params": params, "nonces": [1, 2]}
    return GenerateRequest.model_validate(about | more)


def test_claims_are_the_artifacts_chains_unless_others_are_enforced() -> None:
    artifacts = [{"nonce": 1, "vector_b64": "", "k_points_steps": [200, -5, 3]}, {"nonce": 2, "vector_b64": ""}]
    request = a_request(validation={"artifacts": artifacts})
    assert (request.claims, request.unclaimed()) == ({1: [200, -5, 3]}, [2])
    enforced = {1: [1, 2, 3], 2: [4, 5, 6]}
    request = a_request(validation={"artifacts": artifacts}, enforced_k_steps=enforced)
    assert (request.claims, request.unclaimed()) == (enforced, [])
    assert a_request().claims == {}
    with pytest.raises(ValidationError, match="vector_b64"):
        a_request(validation={"artifacts": [{"nonce": 1, "k_points_steps": [1]}]})
