# SPDX-License-Identifier: Apache-2.0
"""The network's acceptance script against a whole ML node whose engines are fakes: each way that it can end."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cluster.acceptance import FAILED, FRAUD, PASSED, program
from tests.support.fakes.engine import vector
from tests.support.servers.http_server import free_port, serve
from tests.support.servers.ml_node import WholeMlNode, whole_ml_node
from vllm_poc.wire.messages import DEFAULT_K_DIM

NONCES = list(range(0, 400, 2))
REFERENCE: dict[str, Any] = {
    "block_hash": "ac" * 32,
    "block_height": 4712,
    "public_key": "A+reference/key=",
    "params": {"model": "tiny", "seq_len": 64},
    "stat_test": {"dist_threshold": 0.02, "p_mismatch": 0.001, "fraud_threshold": 0.01},
    "artifacts": [{"nonce": nonce, "vector_b64": vector(nonce, DEFAULT_K_DIM)} for nonce in NONCES],
}
TIMES = ["--window", "3", "--interval", "0.3", "--limit", "20"]
ADDRESS = "127.0.0.1"


@pytest.fixture(autouse=True)
def _vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.version", ModuleType("vllm.version"))
    monkeypatch.setattr(sys.modules["vllm.version"], "__version__", "0.32.0", raising=False)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[WholeMlNode]:
    async with whole_ml_node(tmp_path, pods=2) as node:
        yield node


async def run(node: WholeMlNode, folder: Path, *options: str, model: str = "tiny") -> tuple[int, dict[str, Any]]:
    """Run the script in a thread; return its exit status and its report."""
    reference, report, port = folder / "reference.json", folder / "report.json", free_port()
    reference.write_text(json.dumps(REFERENCE))
    url = f"http://{ADDRESS}:{port}/nodes/one/v3.0.16"
    words = [url, model, "--reference", str(reference), "--report", str(report), *TIMES, *options]
    async with serve(node.app, ADDRESS, port):
        status = await asyncio.to_thread(program, words)
    return status, json.loads(report.read_text())


async def test_an_honest_node_is_accepted(node: WholeMlNode, tmp_path: Path) -> None:
    status, report = await run(node, tmp_path)
    assert (status, report["result"], report["error"]) == (PASSED, "PASS", None)
    assert list(report["phases"]) == ["download", "deploy", "throughput", "validate"]
    rates = report["phases"]["throughput"]["backends"]
    assert set(rates) == {"5001", "5002"}
    assert report["phases"]["throughput"]["nonces_per_second"] == sum(rates.values()) > 0
    assert (report["phases"]["validate"]["n_total"], report["phases"]["validate"]["n_mismatch"]) == (len(NONCES), 0)


async def test_a_node_that_computes_something_else_is_a_fraud(node: WholeMlNode, tmp_path: Path) -> None:
    for pod in node.pods.values():
        pod.engine.drift = 50
    status, report = await run(node, tmp_path, "--skip", "throughput")
    assert (status, report["result"]) == (FRAUD, "FRAUD")
    assert report["phases"]["validate"]["mismatch_nonces"] == NONCES


async def test_a_model_that_is_not_served_is_a_hard_error(node: WholeMlNode, tmp_path: Path) -> None:
    told = {0: "no weights of org/another", 1: "ModelMismatch", 2: "org/another was requested"}
    for skipped, why in told.items():
        skips = [word for phase in ("download", "deploy")[:skipped] for word in ("--skip", phase)]
        status, report = await run(node, tmp_path, *skips, model="org/another")
        assert (status, report["result"]) == (FAILED, "ERROR")
        assert why in report["error"]


async def test_a_node_that_computes_nothing_is_a_hard_error(node: WholeMlNode, tmp_path: Path) -> None:
    node.hung.add(next(iter(node.pods)))
    status, report = await run(node, tmp_path)
    assert (status, report["result"]) == (FAILED, "ERROR")
    assert "told no nonces_per_second above 0" in report["error"]


async def test_a_node_that_is_not_there_is_a_hard_error(tmp_path: Path) -> None:
    (tmp_path / "reference.json").write_text("{}")
    files = ["--reference", str(tmp_path / "reference.json"), "--report", str(tmp_path / "report.json")]
    for url in (f"http://{ADDRESS}:{free_port()}", "ftp://host", "host:80"):
        assert program([url, "tiny", *files]) == FAILED
        assert json.loads((tmp_path / "report.json").read_text())["error"]


def test_a_wrong_command_line_does_not_look_like_fraud() -> None:
    with pytest.raises(SystemExit) as ended:
        program(["http://host"])
    assert ended.value.code == FAILED
