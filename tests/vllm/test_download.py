# SPDX-License-Identifier: Apache-2.0
"""The download of a model, by huggingface_hub itself from a server that stands for the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.http_server import free_port
from vllm_poc.download import Progress, wanted

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 48_000_000,
    "pytorch_model.bin": b"x" * 10,
    "original/model.safetensors": b"y" * 10,
}


class Hub(ThreadingHTTPServer):
    """A hub with one model. ``hold`` keeps the second half of the weights back; ``token`` is what it asks for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hold = threading.Event()
        self.hold.set()
        self.token: str | None = None
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def info(self) -> dict[str, Any]:
        """The model as the hub's API tells of it."""
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": hashlib.sha1(content).hexdigest(),  # noqa: S324 - git's ids
                "lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1},
            }
            for name, content in FILES.items()
        ]
        return {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": siblings, "tags": []}

    def tree(self) -> list[dict[str, Any]]:
        """The files of the model as the hub's API lists them."""
        return [
            {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": one["blobId"]}
            | {"lfs": {"oid": one["lfs"]["sha256"], "size": one["size"], "pointerSize": 1}}
            for one in self.info()["siblings"]
        ]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, *, head: bool) -> None:
        name = self.path.split(f"/resolve/{COMMIT}/", 1)[-1]
        if self.server.token is not None and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.send_error(401)
        elif self.path.startswith("/api/models/"):
            told = self.server.tree() if "/tree/" in self.path else self.server.info()
            self._send(json.dumps(told).encode(), {"Content-Type": "application/json"}, head=head)
        elif name not in FILES:
            self.send_error(404)
        else:
            if not head:
                self.server.asked.append(name)
            etag = hashlib.sha256(FILES[name]).hexdigest()
            self._send(FILES[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, head=head)

    def _send(self, body: bytes, headers: dict[str, str], *, head: bool) -> None:
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if head:
            return
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        if len(body) > 1_000_000:
            self.server.hold.wait(60)
        self.wfile.write(body[len(body) // 2 :])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.hold.set()
    found.shutdown()
    found.server_close()


def begin(hub: Hub, cache: Path, port: int, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_poc", "download", "org/model", f"--port={port}"]
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, env={**os.environ, **own, **environment}, stderr=subprocess.PIPE, text=True)


def told(port: int) -> dict[str, int]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
            found: dict[str, int] = json.load(answer)
            return found
    except OSError:
        return {"done": 0, "total": 0}


def test_what_vllm_needs_is_there_and_the_way_there_is_told(hub: Hub, tmp_path: Path) -> None:
    port = free_port()
    hub.hold.clear()
    hub.token = "secret"  # noqa: S105 - of this test
    process = begin(hub, tmp_path, port, HF_TOKEN=hub.token)
    total = len(FILES["config.json"]) + len(FILES["model.safetensors"])
    end = time.monotonic() + 60
    while not total // 8 < (found := told(port))["done"] < total:
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    assert found["total"] == total
    hub.hold.set()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors")
    }
    hub.asked.clear()
    again = begin(hub, tmp_path, port, HF_TOKEN=hub.token)
    again.communicate(timeout=60)
    assert (again.returncode, hub.asked) == (0, [])


def test_a_failure_is_the_last_line(hub: Hub, tmp_path: Path) -> None:
    hub.token = "another"  # noqa: S105 - of this test
    process = begin(hub, tmp_path, free_port())
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    last = said.strip().splitlines()[-1]
    assert last.startswith("error: org/model cannot be downloaded: ")
    assert "401" in last


@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        ({"a.safetensors", "a.bin", "tokenizer.json", "sub/b.pth", "original/c.safetensors"}, 3),
        ({"a.bin", "tokenizer.json"}, 0),
    ],
)
def test_other_forms_of_the_weights_are_left_out(names: set[str], left_out: int) -> None:
    assert len(wanted(names)) == len(names) - left_out


def test_what_is_under_way_counts_and_what_others_left_does_not(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "blobs", {"a": 10, "b": 10})
    assert progress.told() == {"done": 0, "total": 20}
    (tmp_path / "blobs").mkdir()
    for name, size in (("a", 10), ("b.123.incomplete", 4), ("b.incomplete", 3), ("other", 50)):
        (tmp_path / "blobs" / name).write_bytes(b"x" * size)
    assert progress.told() == {"done": 14, "total": 20}
