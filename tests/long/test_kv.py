# SPDX-License-Identifier: Apache-2.0
"""A thousand PoC batches leave what chat's attention holds as it is, while chat changes its KV cache in between."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.long.conftest import Report
from tests.vllm.client import Client
from tests.vllm.device import ON_GPU
from tests.vllm.families import FAMILIES, is_servable
from tests.vllm.server import serving

#: So many batches for each type of cache; with fewer, for a short run, each stretch has fewer.
BATCHES = int(os.environ.get("KV_BATCHES", "1000"))
STRETCHES = 20
BATCH_SIZE = 4
SEQ_LENS = (130, 64, 17, 1)
NONCES = range(max(1, BATCHES // STRETCHES) * BATCH_SIZE)
#: Model and flags: types of caches that PoC allows and the device's attention has, windows beside full attention, and
#: latent attention. A CPU computes over FP8 in 16 bits.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "auto": ("qwen3", ()),
    "fp8": ("qwen3", ("--kv-cache-dtype", "fp8", "--dtype", "bfloat16")),
    "fp8_e5m2": ("qwen3", ("--kv-cache-dtype", "fp8_e5m2", "--dtype", "bfloat16")),
    "windows": ("gemma3", ()),
    "latent": ("deepseek", ()),
}
if ON_GPU:
    CASES.pop("fp8_e5m2")  # with which vLLM's own models fail, also with Triton's attention
    CASES["triton"] = ("qwen3", ("--attention-backend", "TRITON_ATTN"))


@pytest.fixture(scope="module", params=CASES)
def server(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    family, flags = CASES[request.param]
    if not is_servable(family):
        pytest.skip("this release of vLLM has no latent attention for CPU")
    log = tmp_path_factory.mktemp("kv") / "server.log"
    with serving(model_folder / f"{family}-tiny", log, [*FAMILIES[family], *flags]) as client:
        yield client


def compute(server: Client, stretch: int) -> None:
    """Compute as many batches as a stretch has, since none holds more than ``BATCH_SIZE`` nonces."""
    seq_len = SEQ_LENS[stretch % len(SEQ_LENS)]
    if stretch % 2:
        server.distances(NONCES, seq_len=seq_len, batch_size=BATCH_SIZE)
    else:
        server.artifacts(NONCES, seq_len=seq_len, batch_size=BATCH_SIZE, poc_stronger_rng=stretch % 4 == 0)


def test_what_attention_holds_is_the_same_after_a_thousand_batches(server: Client, report: Report) -> None:
    seen = {server.worker("poc_test_kv_checksum")}
    for stretch in range(STRETCHES):
        for question in range(3):
            server.chat(f"Question {question} of {stretch}: what does the License say? " * 8)
        filled, held = server.worker("poc_test_kv_checksum"), server.worker("poc_test_held")
        assert filled not in seen, "the checksum must see chat's writes"
        seen.add(filled)
        compute(server, stretch)
        assert server.worker("poc_test_kv_checksum") == filled
        assert server.worker("poc_test_held") == held
    layers = {name.partition(" ")[0] for name in held if name.endswith(" kv_cache")}
    assert len(layers) == server.worker("poc_describe")["num_layers"], "each layer has a cache that is looked at"
    batches = STRETCHES * len(NONCES) // BATCH_SIZE
    report(
        f"{batches} batches of {BATCH_SIZE} left {len(held)} tensors as they were, chat changed them {STRETCHES} times"
    )
