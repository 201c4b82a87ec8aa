# SPDX-License-Identifier: Apache-2.0
"""Chains of the decode scheme equal those of another implementation, beside chat and in any number of calls."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import count, cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.vllm.client import chain_request
from tests.vllm.device import ON_GPU
from tests.vllm.server import serving
from vllm_poc.rpc import DecodeRequest, DecodeResult, DecodeSetup, chain_nonces
from vllm_poc.wire.stat_test import DEFAULT_TAU, StatTest, compare_chain, is_fraud

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.vllm.client import Client
    from tests.vllm.decode_reference import Chain, DecodeReference

pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytestmark = pytest.mark.skipif(ON_GPU, reason="the decode scheme is proven on CPU alone")

NONCES = [0, 5, 2**31 - 1]
#: Sequences go on from one block of 128 tokens into the next.
SEQ_LEN, STEPS = 120, 12
#: Of the model, and of two nonces and the third.
LAYERS, PREFILLS = 3, 2
chains_of = partial(chain_request, seq_len=SEQ_LEN, steps=STEPS)
SETUP = DecodeSetup(codebook=None, rebuild=True, reserve_bytes=16 * 2**20)
MARGIN_TOLERANCE = 1e-4
FLAGS = ["--worker-extension-cls", "tests.vllm.chain_faults.ChainFaultExtension"]
FLAGS += ["--middleware", "vllm_poc.server.app.PocMiddleware"]
#: The models, and what is changed in their configurations: a dense layer between those with experts takes no router's
#: number.
CHANGES: dict[str, dict[str, Any]] = {"qwen3": {}, "qwen3-moe": {"mlp_only_layers": [1]}}


class Model(NamedTuple):
    """A server, the same model in another library, and that one's chains."""

    client: Client
    reference: DecodeReference
    chains: list[Chain]


@pytest.fixture(scope="module", params=CHANGES)
def model(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """A dense model, and one with seeded experts, both large enough for 256 coordinates."""
    from tests.vllm.decode_reference import DecodeReference  # noqa: PLC0415 - needs transformers
    from tests.vllm.resized import write_resized  # noqa: PLC0415 - needs transformers

    folder = tmp_path_factory.mktemp("decode")
    write_resized(
        model_folder / f"{request.param}-tiny", folder / "model", hidden=320, layers=LAYERS, **CHANGES[request.param]
    )
    flags = ["--enforce-eager", "--max-num-batched-tokens", str(2 * SEQ_LEN + 7), *FLAGS]
    with serving(folder / "model", folder / "server.log", flags) as client:
        facts = client.worker("poc_prepare_decode", SETUP)
        assert facts["refusal"] is None, facts
        reference = DecodeReference(folder / "model")
        yield Model(client, reference, [reference.chain(nonce, SEQ_LEN, STEPS) for nonce in NONCES])


def decoded(client: Client, request: DecodeRequest) -> DecodeResult:
    """Repeat the request until it is complete."""
    for _ in count():
        answer: DecodeResult = client.worker("poc_decode", request)
        assert "error" not in answer, answer
        if answer["complete"]:
            return answer
    raise AssertionError  # unreachable: counting has no end


def test_all_indices_equal_those_of_another_implementation(model: Model) -> None:
    """With two nonces in a prefill, and the third in another."""
    found = decoded(model.client, chains_of(NONCES))
    assert found["indices"] == [chain.points for chain in model.chains]
    assert found["margins"] == []
    assert found["rebuilt"]
    assert len({point for chain in model.chains for point in chain.points}) > 4, "all chains are alike"


def test_forced_chains_go_on_from_the_claims_and_margins_tell_by_how_much_they_lose(model: Model) -> None:
    """Also where the claim is no index, and where it ends early."""
    claims = [[(3 * step + nonce) % 16 for step in range(STEPS + 1)] for nonce in NONCES]
    claims[1][4], claims[1][7] = 200, -5
    claims[2] = claims[2][:6]
    found = decoded(model.client, chains_of(NONCES, claims))
    for row, (nonce, claim) in enumerate(zip(NONCES, claims, strict=True)):
        expected = model.reference.chain(nonce, SEQ_LEN, STEPS, claim)
        assert found["indices"][row] == expected.points
        assert found["margins"][row] == pytest.approx(expected.margins(claim), abs=MARGIN_TOLERANCE)


def test_honest_chains_mismatch_nowhere_and_those_of_other_weights_are_fraud(model: Model) -> None:
    honest = [chain.points for chain in model.chains]
    cheat = deepcopy(model.reference)
    cheat.change_weights()
    cheated = [cheat.chain(nonce, SEQ_LEN, STEPS).points for nonce in NONCES]
    assert mismatches(model.client, honest, tau=0.0) == 0
    found, test = mismatches(model.client, cheated, tau=DEFAULT_TAU), StatTest()
    assert is_fraud(found, len(NONCES), p_mismatch=test.p_mismatch, fraud_threshold=test.fraud_threshold)


def mismatches(client: Client, claims: Sequence[Sequence[int]], *, tau: float) -> int:
    """Return how many of the claimed chains mismatch."""
    found = decoded(client, chains_of(NONCES, claims))
    compared = [compare_chain(*rows) for rows in zip(found["indices"], found["margins"], claims, strict=True)]
    assert None not in compared
    return sum(chain is not None and chain.is_mismatch(tau) for chain in compared)


def test_chat_and_prefill_run_between_steps_and_neither_changes_the_other(model: Model) -> None:
    client, prompt = model.client, "Something long enough to fill more than one block of the cache. " * 5
    before, artifacts = client.chat(prompt), client.artifacts(NONCES)
    checksum = client.worker("poc_test_kv_checksum")
    request = chains_of(NONCES, parts=1)
    assert not client.worker("poc_decode", request)["complete"]
    assert not client.worker("poc_decode", request)["complete"]
    assert client.worker("poc_test_kv_checksum") == checksum
    for _ in range(3):
        assert client.chat(prompt) == before
        assert client.artifacts(NONCES) == artifacts
        assert not client.worker("poc_decode", request)["complete"]
    assert decoded(client, request)["indices"] == [chain.points for chain in model.chains]
    assert client.chat(prompt) == before


def test_chat_and_prefill_run_in_the_middle_of_forward_passes_and_neither_changes_the_other(model: Model) -> None:
    client, prompt = model.client, "Something long enough to fill more than one block of the cache. " * 5
    before, artifacts = client.chat(prompt), client.artifacts(NONCES)
    checksum = client.worker("poc_test_kv_checksum")
    request, left = chains_of(NONCES, parts=1, cut=LAYERS), list[int]()
    while not (found := client.worker("poc_decode", request))["complete"]:
        assert "error" not in found, found
        left.append(found["left"])
        if len(left) in {1, 2, 5, 7, 8, 11, 15, 40}:
            assert int(client.worker("poc_test_waiting_passes")) == (len(left) % LAYERS > 0)
            assert client.worker("poc_test_kv_checksum") == checksum
            assert client.chat(prompt) == before
            assert client.artifacts(NONCES) == artifacts
            checksum = client.worker("poc_test_kv_checksum")
    assert found["indices"] == [chain.points for chain in model.chains]
    assert left == list(range(LAYERS * (PREFILLS + STEPS) - 1, 0, -1)), "each call is a part"
    assert (found["work"], found["cut"], found["parts"]) == ("step", LAYERS, 1)
    assert client.chat(prompt) == before


def test_the_number_of_parts_may_change_from_call_to_call(model: Model) -> None:
    expected = [chain.points for chain in model.chains]
    for numbers in ([2, 3, 1], [1000, 1, 2]):
        parts = cycle(numbers)
        while not (found := model.client.worker("poc_decode", chains_of(NONCES, parts=1, cut=next(parts))))["complete"]:
            assert "error" not in found, found
        assert found["indices"] == expected


def test_a_forward_pass_that_nobody_goes_on_with_is_dropped(model: Model) -> None:
    client = model.client
    for request in (chains_of(NONCES[:1], parts=2, cut=2), chains_of(NONCES, parts=1, cut=LAYERS)):
        assert not client.worker("poc_decode", request)["complete"]
        assert not client.worker("poc_decode", {**request, "block_hash": "another", "parts": 1})["complete"]
        assert int(client.worker("poc_test_waiting_passes")) == 1
        assert decoded(client, chains_of(NONCES[1:]))["indices"] == [chain.points for chain in model.chains[1:]]
        assert int(client.worker("poc_test_waiting_passes")) == 0
    for drop in (["poc_forget"], ["poc_prepare_decode", SETUP]):
        assert client.worker("poc_prepare_decode", SETUP)["refusal"] is None
        assert not client.worker("poc_decode", chains_of(NONCES, parts=1, cut=LAYERS))["complete"]
        client.worker(*drop)
        assert int(client.worker("poc_test_waiting_passes")) == 0


def test_captured_steps_have_as_many_graphs_as_asked_for(model: Model) -> None:
    client, expected = model.client, [chain.points for chain in model.chains]
    try:
        client.worker("poc_test_capture_steps", 0)
        tries = []
        for segments in (1, 2, 2, 1000, 1):
            found = decoded(client, chains_of(NONCES, parts=1, segments=segments))
            assert found["indices"] == expected
            assert (found["work"], found["cut"]) == ("graph", min(segments, LAYERS))
            tries.append(int(client.worker("poc_test_capture_tries")))
        assert tries == [1, 2, 2, 3, 4]
        client.worker("poc_test_capture_steps", 0)
        few = chain_request(NONCES, seq_len=SEQ_LEN, steps=2, parts=1, cut=LAYERS, segments=2)
        assert decoded(client, few)["indices"] == [chain[:3] for chain in expected], "parts are more than steps"
    finally:
        client.worker("poc_prepare_decode", SETUP)


def test_another_request_begins_anew(model: Model) -> None:
    assert not model.client.worker("poc_decode", chains_of(NONCES[:1]))["complete"]
    found = decoded(model.client, chains_of(NONCES[1:]))
    assert found["indices"] == [chain.points for chain in model.chains[1:]]
    assert decoded(model.client, chains_of(NONCES))["indices"] == [chain.points for chain in model.chains]


def test_steps_that_cannot_be_captured_are_tried_again_in_the_next_batches_of_their_size(model: Model) -> None:
    client, expected = model.client, [chain.points for chain in model.chains]
    try:
        client.worker("poc_test_capture_steps", 1)
        found = [decoded(client, chains_of(NONCES)) for _ in range(3)]
        assert [chains["indices"] for chains in found] == [expected] * 3
        assert "Steps of 3 chains could not be captured" in found[0]["findings"][0]
        assert [chains["findings"] for chains in found[1:]] == [[], []]
        assert int(client.worker("poc_test_capture_tries")) == 2
        client.worker("poc_test_capture_steps", 100)
        found = [decoded(client, chains_of(NONCES[:1])) for _ in range(5)]
        assert all("Steps of 1 chains could not be captured" in chains["findings"][0] for chains in found)
        assert int(client.worker("poc_test_capture_tries")) == 3, "it is not tried for ever"
    finally:
        client.worker("poc_prepare_decode", SETUP)


def test_a_pass_that_gives_other_chains_than_vllms_own_is_not_used(model: Model) -> None:
    client = model.client
    try:
        client.worker("poc_test_other_pass", False)
        (finding,) = client.worker("poc_prepare_decode", SETUP)["findings"]
        assert "vLLM's own operations, and slower, since in 2 chains of 3 steps fused ones are further from" in finding
        assert decoded(client, chains_of(NONCES))["indices"] == [chain.points for chain in model.chains]
        client.worker("poc_test_other_pass", True)
        (finding,) = client.worker("poc_prepare_decode", SETUP)["findings"]
        assert "with fused operations: in 2 chains of 3 steps they gave what vLLM's own gave" in finding
    finally:
        client.worker("poc_test_anew")
        client.worker("poc_prepare_decode", SETUP)


def test_chains_that_find_no_memory_are_an_error_that_says_so_and_fewer_are_computed(model: Model) -> None:
    client = model.client
    client.worker("poc_test_lack_memory", 0, SEQ_LEN)
    try:
        assert client.worker("poc_decode", chains_of(NONCES))["error"].startswith("OutOfMemoryError")
        assert decoded(client, chains_of(NONCES[:1]))["indices"] == [model.chains[0].points]
    finally:
        client.worker("poc_test_lack_memory", None)


def test_the_reserve_holds_what_it_says_and_no_more(model: Model) -> None:
    client = model.client
    small: DecodeSetup = {**SETUP, "reserve_bytes": 6 * 2**20}
    try:
        facts = client.worker("poc_prepare_decode", small)
        most = chain_nonces(facts, SEQ_LEN + STEPS)
        assert 1 <= most < facts["max_batch_nonces"]
        assert "error" not in client.worker("poc_decode", chains_of(range(most), parts=1))
        refused = client.worker("poc_decode", chains_of(range(most + 1), parts=1))["error"]
        assert f"{most + 1} chains of {SEQ_LEN + STEPS} tokens" in refused
    finally:
        client.worker("poc_prepare_decode", SETUP)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rebuild": False}, "needs the network's codebook"),
        ({"rebuild": False, "codebook": "/no/such/file.pt"}, "codebook /no/such/file.pt cannot be read"),
        ({"reserve_bytes": 0}, "set some aside"),
        ({"reserve_bytes": 1000}, "has 1000 bytes for keys and values, which is too little"),
    ],
)
def test_a_server_without_what_it_needs_says_so_and_decodes_nothing(
    model: Model, change: dict[str, Any], reason: str
) -> None:
    try:
        assert reason in model.client.worker("poc_prepare_decode", {**SETUP, **change})["refusal"]
        assert "was not prepared" in model.client.worker("poc_decode", chains_of([0]))["error"]
    finally:
        model.client.worker("poc_prepare_decode", SETUP)
