# SPDX-License-Identifier: Apache-2.0
"""The network's acceptance of an ML node, as a program of four phases: download, deploy, throughput, validate.

It speaks as the network's own script does: plain HTTP, POSTs without a Content-Type, and no batch size. The reference
is a JSON file with block, ``params``, ``stat_test`` and ``artifacts``, the vectors that an honest node computes.

Exit status: 0 if the node is accepted, 2 if the fraud test says fraud, 1 if anything else goes wrong. The report, JSON,
is written in every case but that of a wrong command line.
"""

import argparse
import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

PASSED, FAILED, FRAUD = 0, 1, 2
RESULTS = {PASSED: "PASS", FAILED: "ERROR", FRAUD: "FRAUD"}
#: Environment variable with the node's bearer token.
TOKEN = "ACCEPTANCE_TOKEN"  # noqa: S105 - a name
POW = "/api/v1/inference/pow"
#: The network's proxy waits no longer for a backend.
REQUEST_SECONDS = 60.0
POLL_SECONDS = 1.0
#: What the verdict of phase 4 must have.
VERDICT = ("n_total", "n_mismatch", "mismatch_nonces", "p_value", "fraud_detected")


class HardError(Exception):
    """The node cannot be accepted, whatever the fraud test would say."""


class Node:
    """The node's API below its base URL. Every call that fails is a HardError."""

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise HardError(f"the URL is {url}: name the node as http://HOST:PORT, with its base path if it has one")
        self._address = (parts.hostname, parts.port or 80)
        self._base = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return what the node answers."""
        return self._call("GET", path, None)

    def post(self, path: str, body: object) -> Any:  # noqa: ANN401 - JSON
        """Post JSON and return what the node answers."""
        return self._call("POST", path, json.dumps(body).encode())

    def _call(self, method: str, path: str, body: bytes | None) -> Any:  # noqa: ANN401 - JSON
        connection = http.client.HTTPConnection(*self._address, timeout=REQUEST_SECONDS)
        try:
            connection.request(method, f"{self._base}{path}", body, self._headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise HardError(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise HardError(f"{method} {path}: HTTP {answer.status}: {text}")
        try:
            return json.loads(text)
        except ValueError:
            raise HardError(f"{method} {path}: the answer is no JSON: {text}") from None


Report = dict[str, Any]
Phase = Callable[[Node, argparse.Namespace, Mapping[str, Any]], Report]


def download(node: Node, options: argparse.Namespace, _: Mapping[str, Any]) -> Report:
    """Phase 1: let the node fetch the weights, and wait until it has them."""
    model = {"hf_repo": options.model, "hf_commit": None}
    before = _field(node.post("/api/v1/models/status", model), "status")
    told = _field(node.post("/api/v1/models/download", model), "status")

    def is_there() -> bool:
        status = _field(node.post("/api/v1/models/status", model), "status")
        if status == "NOT_FOUND" and told == "IGNORED":
            raise HardError(f"the node has no weights of {options.model}, and does not fetch them")
        return bool(status == "DOWNLOADED")

    _wait_until(is_there, options.limit, f"the weights of {options.model} are not there")
    return {"before": before, "download": told}


def deploy(node: Node, options: argparse.Namespace, _: Mapping[str, Any]) -> Report:
    """Phase 2: let the node serve the model, and wait until it runs."""
    asked = {"model": options.model, "dtype": options.dtype, "additional_args": options.additional_arg}
    node.post("/api/v1/inference/up/async", asked)
    told: Report = {}

    def runs() -> bool:
        told.update(node.get("/api/v1/inference/up/status"))
        if told.get("status") == "failed":
            raise HardError(f"the node could not serve {options.model}: {told.get('error')}")
        return bool(_field(told, "is_running"))

    _wait_until(runs, options.limit, f"the node does not serve {options.model}")
    return told


def throughput(node: Node, options: argparse.Namespace, reference: Mapping[str, Any]) -> Report:
    """Phase 3: let the node generate for a while; each of its backends must tell its rate."""
    began = node.post(f"{POW}/init/generate", _work(options, reference) | _receiver(options))
    rates: dict[int, list[float]] = {}
    try:
        end = time.monotonic() + options.window
        while time.monotonic() < end:
            time.sleep(options.interval)
            for backend in _field(node.get(f"{POW}/status"), "backends"):
                rates.setdefault(_field(backend, "port"), []).append(_field(backend, "nonces_per_second"))
    finally:
        stopped = node.post(f"{POW}/stop", {})
    each = {port: _rate(port, samples) for port, samples in rates.items()}
    if len(each) < _field(began, "backends"):
        raise HardError(f"{began['backends']} backends began, and {len(each)} told of themselves")
    _wait_until(lambda: bool(_field(node.get(f"{POW}/status"), "status") == "IDLE"), options.limit, "the node goes on")
    return {"backends": each, "nonces_per_second": sum(each.values()), "init": began, "stop": stopped}


def validate(node: Node, options: argparse.Namespace, reference: Mapping[str, Any]) -> Report:
    """Phase 4: let the node compare the reference's vectors with its own."""
    artifacts = _field(reference, "artifacts")
    asked = {
        "nonces": [artifact["nonce"] for artifact in artifacts],
        "wait": True,
        "validation": {"artifacts": artifacts},
        "stat_test": _field(reference, "stat_test"),
    }
    told = node.post(f"{POW}/generate", _work(options, reference) | asked)
    return {name: _field(told, name) for name in VERDICT}


PHASES: Mapping[str, Phase] = {
    "download": download,
    "deploy": deploy,
    "throughput": throughput,
    "validate": validate,
}


def _work(options: argparse.Namespace, reference: Mapping[str, Any]) -> Report:
    block = {name: _field(reference, name) for name in ("block_hash", "block_height", "public_key")}
    params = _field(reference, "params") | {"model": options.model}
    return block | {"node_id": options.node_id, "node_count": options.node_count, "params": params}


def _receiver(options: argparse.Namespace) -> Report:
    return {"url": options.callback_url} if options.callback_url else {}


def _rate(port: int, samples: Sequence[float]) -> float:
    told = [sample for sample in samples if sample > 0]
    if not told:
        raise HardError(f"backend {port} told no nonces_per_second above 0 in {len(samples)} samples")
    return statistics.median(told)


def _field(told: Any, name: str) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(told, dict) or told.get(name) is None:
        raise HardError(f"{name} is missing in {json.dumps(told)[:500]}")
    return told[name]


def _wait_until(holds: Callable[[], bool], seconds: float, otherwise: str) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise HardError(f"{otherwise} after {seconds:g} s")
        time.sleep(POLL_SECONDS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Not argparse's own 2, which means fraud here.
        self.exit(FAILED, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m tests.cluster.acceptance", description=__doc__)
    parser.add_argument("url", help="the node's base URL")
    parser.add_argument("model", help="the model's id")
    parser.add_argument("--reference", type=Path, required=True, help="JSON file with what an honest node computes")
    parser.add_argument("--report", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--skip", action="append", default=[], choices=PHASES, help="a phase to leave out")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--additional-arg", action="append", default=[], help="an argument of vLLM")
    parser.add_argument("--node-id", type=int, default=0)
    parser.add_argument("--node-count", type=int, default=1)
    parser.add_argument("--callback-url", help="where the results of phase 3 go; needed to make a reference of them")
    parser.add_argument("--window", type=float, default=60.0, help="seconds of phase 3")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that the node may take for its state")
    return parser


def program(arguments: Sequence[str] | None = None) -> int:
    """Run the phases, write the report, and return the exit status."""
    options = _parser().parse_args(arguments)
    phases: dict[str, Report] = {}
    error: str | None = None
    try:
        reference = json.loads(options.reference.read_text())
        node = Node(options.url, os.environ.get(TOKEN))
        for name, phase in PHASES.items():
            if name not in options.skip:
                phases[name] = phase(node, options, reference)
    except (HardError, OSError, ValueError) as failure:
        error = str(failure)
    is_fraud = phases.get("validate", {}).get("fraud_detected", False)
    status = FAILED if error is not None else FRAUD if is_fraud else PASSED
    report = {"url": options.url, "model": options.model, "result": RESULTS[status], "error": error, "phases": phases}
    options.report.write_text(json.dumps(report, indent=2))
    return status


if __name__ == "__main__":
    sys.exit(program())
