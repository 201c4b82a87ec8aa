# SPDX-License-Identifier: Apache-2.0
"""A server that is set up for the decode scheme answers all of its routes, as the network asks, and chat beside."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError

import pytest

from tests.support.patience import PATIENCE
from tests.vllm.client import ROUND, Client
from tests.vllm.device import ON_GPU
from tests.vllm.families import POC_WITH_CHECKSUMS
from tests.vllm.server import MODEL_NAME, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.fakes.receiver import Receiver
    from tests.vllm.decode_reference import DecodeReference

pytest.importorskip("torch", reason="needs the worker environment: python3 -m hack.vllm")
pytestmark = pytest.mark.skipif(ON_GPU, reason="the decode scheme is proven on CPU alone")

SEQ_LEN, STEPS = 24, 8
#: What the network's node sends.
PARAMS = {"model": MODEL_NAME, "seq_len": SEQ_LEN, "decode": True, "max_tokens": STEPS}
ENVIRONMENT = {"VLLM_POC_DECODE_REBUILD_CODEBOOK": "1", "VLLM_POC_DECODE_RESERVE_BYTES": str(128 * 2**20)}
#: Chains that are compared with another implementation, step by step.
COMPARED = 4
NONCES = list(range(12))
PROMPT = "Something long enough to fill more than one block of the cache. " * 5


class Served(NamedTuple):
    """A server, and the same model in another library."""

    client: Client
    reference: DecodeReference

    def chains(self, nonces: Sequence[int]) -> list[list[int]]:
        """Return the chains of the other library."""
        return [self.reference.chain(nonce, SEQ_LEN, STEPS).points for nonce in nonces]

    def claimed(self, **fields: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        """Return what a prover sends of the nonces."""
        artifacts = self.client.generate(nonces=NONCES, params=PARAMS, **fields)["artifacts"]
        return [{name: one[name] for name in ("nonce", "vector_b64", "k_points_steps")} for one in artifacts]


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from tests.vllm.decode_reference import DecodeReference  # noqa: PLC0415 - needs transformers
    from tests.vllm.resized import write_resized  # noqa: PLC0415 - needs transformers

    folder = tmp_path_factory.mktemp("routes")
    write_resized(model_folder / "qwen3-tiny", folder / "model", hidden=320, layers=2)
    flags = ["--enforce-eager", *POC_WITH_CHECKSUMS]
    with serving(folder / "model", folder / "server.log", flags, ENVIRONMENT) as client:
        yield Served(client, DecodeReference(folder / "model"))


def test_the_server_says_what_it_offers_and_that_its_codebook_is_not_the_networks(served: Served) -> None:
    told = served.client.versions()
    assert (told["schemes"], told["rebuilt_codebook"]) == (["prefill", "decode"], True)
    model = served.client.status()["model"]
    assert (model["error"], model["rebuilt_codebook"]) == (None, True)
    assert "for experiments alone" in model["findings"][-1]


def test_rounds_beside_chat_deliver_each_chain_once_and_go_on_where_they_were_stopped(
    served: Served, receiver: Receiver
) -> None:
    client, before = served.client, served.client.chat(PROMPT)
    with ThreadPoolExecutor(1) as beside:
        delivered = 0
        for _ in range(2):
            client.start(params=PARAMS, url=receiver.url, round_id="a", start_index=delivered)
            chat = beside.submit(client.chat, PROMPT)
            assert receiver.wait_for(len(receiver.bodies) + 1, 60 * PATIENCE)
            assert chat.result() == before
            client.stop()
            delivered = client.status()["delivered_index"]
    mined = [artifact for body in receiver.bodies for artifact in body["artifacts"]]
    assert [one["nonce"] for one in mined] == list(range(delivered))
    assert all(one["vector_b64"] == "" and len(one["k_points_steps"]) == STEPS + 1 for one in mined)
    assert [one["k_points_steps"] for one in mined[:COMPARED]] == served.chains(range(COMPARED))
    assert {body["rebuilt_codebook"] for body in receiver.bodies} == {True}
    found = verdict(client, mined[: len(NONCES)])
    assert (found["n_total"], found["n_mismatch"]) == (len(NONCES), 0)


def test_named_nonces_are_answered_with_the_chains_of_another_implementation(served: Served) -> None:
    found = served.client.generate(nonces=NONCES[:COMPARED], params=PARAMS)
    assert [one["k_points_steps"] for one in found["artifacts"]] == served.chains(NONCES[:COMPARED])
    assert {one["n_sphere_mismatches"] for one in found["artifacts"]} == {-1}
    assert found["rebuilt_codebook"] is True


def verdict(client: Client, artifacts: Sequence[dict[str, Any]], **fields: Any) -> Any:  # noqa: ANN401
    return client.generate(nonces=NONCES, params=PARAMS, validation={"artifacts": list(artifacts)}, **fields)


def test_an_honest_prover_passes_and_chains_of_another_round_are_fraud(served: Served) -> None:
    found = verdict(served.client, served.claimed(), stat_test={"dist_threshold": 0.0})
    assert (found["n_total"], found["n_mismatch"], found["fraud_detected"]) == (len(NONCES), 0, False)
    assert {one["n_steps"] for one in found["per_nonce"]} == {STEPS + 1}
    found = verdict(served.client, served.claimed(block_hash="other"))
    assert found["n_mismatch"] > len(NONCES) // 2
    assert found["fraud_detected"] is True


def test_a_queued_verdict_is_delivered(served: Served, receiver: Receiver) -> None:
    queued = verdict(served.client, served.claimed(public_key="other"), wait=False, url=receiver.url)
    (told,) = receiver.verdicts_of(queued["request_id"], 30 * PATIENCE)
    assert (told["fraud_detected"], told["n_excluded"], told["rebuilt_codebook"]) == (True, 0, True)
    end = time.monotonic() + 30 * PATIENCE
    while (found := served.client.job(queued["request_id"]))["status"] != "completed":
        assert time.monotonic() < end, found
        time.sleep(0.05)
    assert found["mismatch_nonces"] == told["mismatch_nonces"]


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"params": {**PARAMS, "max_tokens": 1001}}, 422, "SequenceTooLong"),
        ({"params": {**PARAMS, "max_tokens": 0}}, 422, "InvalidRequest"),
        ({"params": {**PARAMS, "model": "other"}}, 409, "ModelMismatch"),
        (
            {"validation": {"artifacts": [{"nonce": nonce, "vector_b64": ""} for nonce in NONCES]}},
            400,
            "InvalidRequest",
        ),
    ],
    ids=["too long", "no steps", "another model", "no chains"],
)
def test_what_the_server_cannot_do_is_refused(served: Served, fields: dict[str, Any], status: int, reason: str) -> None:
    with pytest.raises(HTTPError) as refused:
        served.client.poc("generate", {**ROUND, "params": PARAMS, "nonces": NONCES, "wait": True, **fields})
    assert (refused.value.code, json.load(refused.value)["reason"]) == (status, reason)
