# SPDX-License-Identifier: Apache-2.0
"""How many mismatches make fraud, through the real routes and on real results."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.client import K_DIM, ROUND, Client
from tests.vllm.server import MODEL_NAME, serving

SEQ_LEN = 16
PARAMS = {"model": MODEL_NAME, "seq_len": SEQ_LEN, "k_dim": K_DIM}
#: Above what two honest runs in bfloat16 differ by, far below the distance of unrelated vectors.
DIST_THRESHOLD = 0.2
R_TARGET = 1.414
#: p_mismatch, fraud_threshold, nonces, and the fewest mismatches that are fraud.
ARTIFACT_TABLE = [
    (0.001, 0.01, 10, 1),
    (0.001, 0.01, 11, 2),
    (0.001, 0.01, 100, 2),
    (0.001, 0.01, 150, 3),
    (0.001, 0.01, 200, 3),
    (0.1, 0.05, 200, 28),
    (0.1, 0.01, 200, 31),
]
DISTANCE_TABLE = [(5e-4, 0.01, 20, 1), (5e-4, 0.01, 21, 2), (5e-4, 0.01, 200, 2), (0.001, 0.01, 150, 3)]
#: Their p-values, computed apart from the server: (p_mismatch, nonces, mismatches).
P_VALUES = {
    (0.001, 10, 1): 0.0099551198,
    (0.001, 11, 1): 0.010945165,
    (0.001, 100, 2): 0.0046380684,
    (0.001, 200, 2): 0.017457511,
    (0.001, 200, 3): 0.0011337681,
    (0.1, 200, 27): 0.067224684,
    (0.1, 200, 28): 0.043428500,
    (0.1, 200, 30): 0.016326566,
    (0.1, 200, 31): 0.0095083119,
}


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("verdicts") / "server.log"
    with serving(model_folder / "qwen3-tiny", log, ["--enforce-eager", "--enable-poc"]) as client:
        yield client


@pytest.fixture(scope="module")
def artifacts(server: Client) -> list[dict[str, Any]]:
    """What a prover sends of the nonces 0..200."""
    found: list[dict[str, Any]] = server.generate(nonces=list(range(201)), params=PARAMS)["artifacts"]
    return found


@pytest.fixture(scope="module")
def distances(server: Client) -> dict[int, float]:
    """The distance of each of the first 500 nonces."""
    return dict(enumerate(server.distances(range(500), seq_len=SEQ_LEN)))


def check(found: dict[str, Any], *, p: float, threshold: float, count: int, wrong: int, fraud: bool) -> None:
    assert (found["n_total"], found["n_mismatch"], len(found["mismatch_nonces"])) == (count, wrong, wrong)
    assert found["fraud_detected"] is fraud
    assert (found["p_value"] < threshold) is fraud
    if (expected := P_VALUES.get((p, count, wrong))) is not None:
        assert found["p_value"] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("short_of", [1, 0], ids=["one too few", "enough"])
@pytest.mark.parametrize(("p", "threshold", "count", "fewest"), ARTIFACT_TABLE)
def test_wrong_artifacts_are_fraud_from_a_number_on(
    server: Client,
    artifacts: list[dict[str, Any]],
    p: float,
    threshold: float,
    count: int,
    fewest: int,
    short_of: int,
) -> None:
    wrong = fewest - short_of
    claims = [dict(artifact) for artifact in artifacts[:count]]
    for claim, stolen in zip(claims[:wrong], artifacts[1:], strict=False):
        claim["vector_b64"] = stolen["vector_b64"]
    found = server.generate(
        nonces=list(range(count)),
        params=PARAMS,
        validation={"artifacts": claims},
        stat_test={"dist_threshold": DIST_THRESHOLD, "p_mismatch": p, "fraud_threshold": threshold},
    )
    check(found, p=p, threshold=threshold, count=count, wrong=wrong, fraud=not short_of)


@pytest.mark.parametrize("short_of", [1, 0], ids=["one too few", "enough"])
@pytest.mark.parametrize(("p", "threshold", "count", "fewest"), DISTANCE_TABLE)
def test_wrong_distances_are_fraud_from_a_number_on(
    server: Client, distances: dict[int, float], p: float, threshold: float, count: int, fewest: int, short_of: int
) -> None:
    wrong = fewest - short_of
    by_distance = sorted(distances, key=lambda nonce: distances[nonce])
    nonces = [*by_distance[: count - wrong], *by_distance[len(by_distance) - wrong :]]
    # The wrong ones are claimed to be as near as the best.
    claimed = [min(distances[nonce], R_TARGET - 0.01) for nonce in nonces]
    test = {"p_mismatch": p, "fraud_threshold": threshold}
    server.poc("init/validate", {**ROUND, "r_target": R_TARGET, "seq_len": SEQ_LEN, **test})
    found = server.poc("validate", {**ROUND, "nonces": nonces, "dist": claimed})
    server.stop()
    check(found, p=p, threshold=threshold, count=count, wrong=wrong, fraud=not short_of)
