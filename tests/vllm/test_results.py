# SPDX-License-Identifier: Apache-2.0
"""Results depend on the round and the nonce alone."""

import json
from pathlib import Path

import pytest

from tests.support.builders.batches import a_batch
from tests.vllm.client import Client
from tests.vllm.device import BATCH_TOLERANCE, skip_without_drafts
from tests.vllm.families import FAMILIES
from tests.vllm.server import serving

NONCES = range(16)


def largest_difference(left: list[list[float]], right: list[list[float]]) -> float:
    pairs = zip(left, right, strict=True)
    return max(abs(a - b) for a_row, b_row in pairs for a, b in zip(a_row, b_row, strict=True))


def test_a_restarted_server_computes_the_same(qwen3: Client, model_folder: Path, tmp_path: Path) -> None:
    flags = ["--enforce-eager", "--enable-poc"]
    with serving(model_folder / "qwen3-tiny", tmp_path / "server.log", flags) as restarted:
        for strong in (False, True):
            expected = qwen3.artifacts(range(64), poc_stronger_rng=strong)
            assert restarted.artifacts(range(64), poc_stronger_rng=strong) == expected
            expected_distances = qwen3.distances(range(64), poc_stronger_rng=strong)
            assert restarted.distances(range(64), poc_stronger_rng=strong) == expected_distances


def test_another_hash_or_key_gives_other_artifacts(qwen3: Client) -> None:
    mine = qwen3.artifacts(NONCES)
    for theirs in (
        qwen3.artifacts(NONCES, block_hash="other"),
        qwen3.artifacts(NONCES, public_key="other"),
    ):
        assert all(largest_difference([a], [b]) > 0.1 for a, b in zip(mine, theirs, strict=True))


def test_the_batch_around_a_nonce_hardly_matters(qwen3: Client) -> None:
    for seq_len in (17, 64, 130):
        alone = qwen3.artifacts(NONCES, seq_len=seq_len, batch_size=1)
        together = qwen3.artifacts(NONCES, seq_len=seq_len, batch_size=8)
        assert largest_difference(alone, together) <= BATCH_TOLERANCE


def test_chat_leaves_no_trace_in_the_results(qwen3: Client) -> None:
    before = qwen3.artifacts(NONCES, seq_len=130)
    qwen3.chat("Something long enough to fill more than one block of the cache. " * 12)
    assert qwen3.artifacts(NONCES, seq_len=130) == before


def test_more_nonces_than_one_batch_holds_are_sliced(qwen3: Client) -> None:
    facts = qwen3.worker("poc_describe")
    assert facts["refusal"] is None
    assert facts["fused"] or facts["scratch_bytes"] > 0
    count = facts["max_batch_nonces"] + 1
    assert len(qwen3.artifacts(range(count), seq_len=1, batch_size=65_536)) == count


def test_the_engine_survives_a_batch_that_is_too_large(qwen3: Client) -> None:
    request = a_batch([0], seq_len=qwen3.worker("poc_describe")["max_model_len"] + 1)
    assert "seq_len 1025 must lie in 1..1024" in qwen3.worker("poc_compute", request)["error"]
    assert qwen3.artifacts([0]) != []


@pytest.mark.long
def test_drafts_by_ngrams_change_no_result_and_poc_none_of_chats_tokens(
    qwen3: Client, model_folder: Path, tmp_path: Path
) -> None:
    """The target's forward pass is the same, and no other model drafts."""
    skip_without_drafts()
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    flags = [*FAMILIES["qwen3"], "--speculative-config", json.dumps(drafts)]
    prompt = "one two three four " * 20
    with serving(model_folder / "qwen3-tiny", tmp_path / "server.log", flags) as drafting:
        before = [drafting.chat(prompt), drafting.chat(prompt)]
        assert before == [qwen3.chat(prompt)] * 2
        filled = drafting.worker("poc_test_kv_checksum")
        for seq_len in (1, 4, 17, 64, 130):  # some as short as drafts are
            assert drafting.artifacts(NONCES, seq_len=seq_len) == qwen3.artifacts(NONCES, seq_len=seq_len)
        assert drafting.worker("poc_test_kv_checksum") == filled
        assert drafting.chat(prompt) == before[0]
        assert drafting.metric("vllm:spec_decode_num_draft_tokens_total") > 0, "chat must have had drafts"
