# SPDX-License-Identifier: Apache-2.0
"""The share of valid nonces is the same for all block hashes, and what theory says."""

from __future__ import annotations

import math
from statistics import fmean, variance
from typing import TYPE_CHECKING

import pytest

from poc_operator.calibrations.plan import valid_rate
from tests.vllm.server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.long.conftest import Report
    from tests.vllm.client import Client

pytest.importorskip("torch", reason="needs the worker environment: make test-long")

#: With so many the share of one hash is known to 0.5 points.
NONCES = 10_000
NONCES_PER_REQUEST = 2000
BATCH_SIZE = 256
SEQ_LEN = 8
HASHES = [f"{number:064x}" for number in range(1, 11)]
#: And the rates that the network expects of them.
R_TARGETS = {1.416: 0.5905, 1.405: 0.1199}
#: In points, between the highest and the lowest of the hashes at the first target.
LARGEST_SPREAD = 0.05
SIGMAS = 4
WIDE = 1024


@pytest.fixture(scope="module", params=["qwen3-tiny", "llama-tiny", "wide"])
def server(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp(request.param)
    model = model_folder / request.param
    if request.param == "wide":
        from tests.vllm.resized import write_resized  # noqa: PLC0415 - needs transformers

        model = folder / "model"
        write_resized(model_folder / "qwen3-tiny", model, hidden=WIDE, layers=1)
    with serving(model, folder / "server.log", ["--enforce-eager", "--enable-poc"]) as client:
        yield client


def distances(server: Client, block_hash: str) -> list[float]:
    found: list[float] = []
    for first in range(0, NONCES, NONCES_PER_REQUEST):
        nonces = range(first, first + NONCES_PER_REQUEST)
        found += server.distances(nonces, seq_len=SEQ_LEN, batch_size=BATCH_SIZE, block_hash=block_hash)
    return found


def deviation(rate: float) -> float:
    """Standard deviation of the share among `NONCES` if each is valid with probability ``rate``."""
    return math.sqrt(rate * (1 - rate) / NONCES)


def test_the_valid_rate_is_what_theory_says(server: Client, report: Report) -> None:
    from tests.long.theory import block_rate  # noqa: PLC0415 - needs torch

    hidden = server.status()["model"]["hidden_size"]
    found = {block_hash: distances(server, block_hash) for block_hash in HASHES}
    spreads = []
    for r_target, known in R_TARGETS.items():
        rates = [sum(value < r_target for value in found[block_hash]) / NONCES for block_hash in HASHES]
        expected = [block_rate(r_target, block_hash, hidden) for block_hash in HASHES]
        sphere = valid_rate(r_target)
        off = [(rate - theory) / deviation(theory) for rate, theory in zip(rates, expected, strict=True)]
        off_sphere = [(rate - sphere) / deviation(sphere) for rate in rates]
        spreads.append(max(rates) - min(rates))
        report(f"hidden {hidden}, r_target {r_target}: rates {percent(rates)}")
        report(f"  theory with the block's head {percent(expected)}: off by {sigmas(off)} sigma")
        report(f"  theory of the sphere {percent([sphere])}: off by {sigmas(off_sphere)} sigma")
        mean, deviation_of_mean = fmean(rates), math.sqrt((deviation(sphere) ** 2 + variance(expected)) / len(rates))
        report(f"  mean {percent([mean])}, spread {spreads[-1] * 100:.2f} points, {spreads[-1] / mean:.1%} of the mean")
        assert sphere == pytest.approx(known, abs=5e-5)
        assert max(map(abs, off)) <= SIGMAS
        assert abs(mean - sphere) <= SIGMAS * deviation_of_mean
    assert spreads[0] < LARGEST_SPREAD


def percent(rates: list[float]) -> str:
    return " ".join(f"{rate:.2%}" for rate in rates)


def sigmas(values: list[float]) -> str:
    return " ".join(f"{value:+.1f}" for value in values)
