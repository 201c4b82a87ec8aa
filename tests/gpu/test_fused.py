# SPDX-License-Identifier: Apache-2.0
"""The fused forward pass computes what vLLM's own computes, on a model of real size."""

from __future__ import annotations

import base64
import logging
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.vllm.client import Client

torch = pytest.importorskip("torch", reason="needs the worker environment")

from tests.gpu.conftest import WHOLE  # noqa: E402
from tests.support.builders.batches import a_batch  # noqa: E402

_log = logging.getLogger(__name__)

NONCES = list(range(1000))
TOKENS = 8192
#: L2 distance of two artifacts, which have length 1; the smallest threshold in production is 0.2.
MEAN_DISTANCE, LARGEST_DISTANCE = 0.02, 0.1
#: The same for two distances.
DISTANCE = 1e-3


def request(seq_len: int, protocol: str, nonces: list[int] = NONCES) -> dict[str, Any]:
    return {**a_batch(nonces, seq_len=seq_len, protocol=protocol, batch=TOKENS // seq_len)}


def answer(client: Client, method: str, *args: object) -> Any:  # noqa: ANN401
    """Call all workers; with several ranks, some have no answer."""
    found = next(found for found in client.workers(method, *args) if found is not None)
    assert "error" not in found, found
    return found


def computed(client: Client, asked: dict[str, Any]) -> Any:  # noqa: ANN401
    found, _ = client.computed(asked)
    assert "error" not in found, found
    return found


def vectors(result: dict[str, Any]) -> Any:  # noqa: ANN401 - torch need not be there
    assert result["not_finite"] == []
    raw = b"".join(base64.b64decode(vector) for vector in result["vectors"])
    return torch.frombuffer(bytearray(raw), dtype=torch.float16).view(len(NONCES), -1).float()


@pytest.mark.parametrize("seq_len", [64, 256, 1024])
def test_artifacts_are_those_of_the_unfused_pass(real_client: Client, seq_len: int) -> None:
    assert answer(real_client, "poc_describe")["fused"]
    asked = request(seq_len, "artifact")
    answer(real_client, "poc_warm_up", asked | {"nonces": NONCES[: asked["batch"]]}, WHOLE)
    found = vectors(computed(real_client, asked))
    expected = vectors(answer(real_client, "poc_test_unfused", asked))
    distances = torch.linalg.vector_norm(found - expected, dim=1)
    _log.info("seq_len %d: mean %.4f, largest %.4f", seq_len, distances.mean(), distances.max())
    assert distances.mean() <= MEAN_DISTANCE
    assert distances.max() <= LARGEST_DISTANCE


@pytest.mark.parametrize("seq_len", [64, 256, 1024])
def test_distances_are_those_of_the_unfused_pass(real_client: Client, seq_len: int) -> None:
    asked = request(seq_len, "distance")
    found = torch.tensor(computed(real_client, asked)["distances"])
    expected = torch.tensor(answer(real_client, "poc_test_unfused", asked)["distances"])
    differences = (found - expected).abs()
    _log.info("seq_len %d: mean %.6f, largest %.6f", seq_len, differences.mean(), differences.max())
    assert differences.max() <= DISTANCE


@pytest.mark.parametrize("protocol", ["artifact", "distance"])
def test_the_same_batch_gives_the_same_bits_captured_or_not(real_client: Client, protocol: str) -> None:
    asked = request(32, protocol, NONCES[:128])  # no other test prepares passes of this length
    eager = computed(real_client, asked)
    assert computed(real_client, asked) == eager
    assert answer(real_client, "poc_warm_up", asked, WHOLE)["seconds"] > 0
    assert computed(real_client, asked) == eager
    later = asked | {"nonces": NONCES[128:256]}
    begun = computed(real_client, asked | {"ahead": [later["nonces"]]})
    assert begun == eager
    assert computed(real_client, later)["nonces"] == later["nonces"]


def test_a_pass_in_segments_gives_the_same_bits(real_client: Client) -> None:
    facts = answer(real_client, "poc_describe")
    asked = request(256, "artifact", NONCES[:8])
    assert answer(real_client, "poc_warm_up", asked, WHOLE)["segments"] == 1
    whole = computed(real_client, asked)
    segments = answer(real_client, "poc_warm_up", asked, 1e-4)["segments"]
    assert segments == facts["num_layers"] // facts["stages"], "no segment is less than a layer"
    # What else is computed between two passes, and what is begun ahead and then not wanted, changes nothing.
    for ahead, between in (([], None), ([NONCES[8:16]], None), ([], request(64, "distance", NONCES[:4]))):
        found, calls = real_client.computed(asked | {"ahead": ahead})
        assert calls == segments * facts["stages"]
        assert found["vectors"] == whole["vectors"]
        if between is not None:
            computed(real_client, between)
    fewer = answer(real_client, "poc_warm_up", asked, WHOLE)
    assert fewer["segments"] == 1


def test_fewer_nonces_than_were_captured_give_the_same(real_client: Client) -> None:
    asked = request(64, "artifact", NONCES[:128])
    answer(real_client, "poc_warm_up", asked, WHOLE)
    all_of_them = computed(real_client, asked)
    some = computed(real_client, asked | {"nonces": NONCES[:33]})
    assert some["vectors"] == all_of_them["vectors"][:33]


def test_chats_cache_stays_as_it_is(real_client: Client) -> None:
    chat = real_client.chat("Tell me about licenses.")
    before = real_client.workers("poc_test_kv_checksum")
    asked = request(256, "artifact", NONCES[: TOKENS // 256])
    eager = computed(real_client, asked)
    assert answer(real_client, "poc_warm_up", asked, WHOLE)["seconds"] > 0
    assert computed(real_client, asked) == eager
    assert real_client.workers("poc_test_kv_checksum") == before
    # The attention of both schedules its work in the same memory.
    assert real_client.chat("Tell me about licenses.") == chat
    assert computed(real_client, asked) == eager
