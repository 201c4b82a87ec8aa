# SPDX-License-Identifier: Apache-2.0
"""A thousand PoC batches leave every byte of the real KV cache as it is, while chat changes it in between."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.long.conftest import Report
from tests.vllm.client import Client
from tests.vllm.families import FAMILIES
from tests.vllm.server import serving

BATCHES = 1000
STRETCHES = 20
BATCH_SIZE = 4
SEQ_LENS = (130, 64, 17, 1)
NONCES = range(BATCHES // STRETCHES * BATCH_SIZE)


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("kv") / "server.log"
    with serving(model_folder / "qwen3-tiny", log, FAMILIES["qwen3"]) as client:
        yield client


def compute(server: Client, stretch: int) -> None:
    """Compute as many batches as a stretch has, since none holds more than ``BATCH_SIZE`` nonces."""
    seq_len = SEQ_LENS[stretch % len(SEQ_LENS)]
    if stretch % 2:
        server.distances(NONCES, seq_len=seq_len, batch_size=BATCH_SIZE)
    else:
        server.artifacts(NONCES, seq_len=seq_len, batch_size=BATCH_SIZE, poc_stronger_rng=stretch % 4 == 0)


def test_the_kv_cache_is_the_same_after_a_thousand_batches(server: Client, report: Report) -> None:
    seen = {server.worker("poc_test_kv_checksum")}
    for stretch in range(STRETCHES):
        for question in range(3):
            server.chat(f"Question {question} of {stretch}: what does the License say? " * 8)
        filled = server.worker("poc_test_kv_checksum")
        assert filled not in seen, "the checksum must see chat's writes"
        seen.add(filled)
        compute(server, stretch)
        assert server.worker("poc_test_kv_checksum") == filled
    report(f"{BATCHES} batches of {BATCH_SIZE} left the KV cache as it was, chat changed it {STRETCHES} times")
