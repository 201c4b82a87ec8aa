# SPDX-License-Identifier: Apache-2.0
"""What the process logs says what it is about, in the fields that operator and pods have too."""

import json
import time
from pathlib import Path
from typing import Any

import httpx

from tests.simulation.gateway_process import gateway
from tests.support.builders.deliveries import artifacts, path, round_body

SECONDS = 15


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def line_about(log: Path, message: str) -> dict[str, Any]:
    """Wait for a line with this message."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found = [line for line in lines(log) if message in line["message"]]
        if found:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"no line has {message!r}: {log.read_text()}")


def test_lines_name_round_slot_and_request(tmp_path: Path) -> None:
    rounds, log = tmp_path / "rounds.json", tmp_path / "log"
    # Nobody listens there, so that forwarding fails.
    rounds.write_text(json.dumps([round_body(callbackURL="http://127.0.0.1:9", groups=2)]))
    private = {"POC_GATEWAY_RECEIVER_PRIVATE": "127.0.0.0/8"}
    with gateway(f"sqlite:///{tmp_path}/gateway.db", rounds, log, private) as running:
        for request, body in (("r-1", artifacts([1])), ("r-2", artifacts([1], block_hash="cd" * 32))):
            httpx.post(running.url + path(), content=body, headers={"X-Request-Id": request}, timeout=30)
        httpx.post(running.url + path(), content=b"[]", headers={"X-Request-Id": "no id"}, timeout=30)
        refused = line_about(log, "a delivery is refused: block_hash")
        unread = line_about(log, "a delivery is refused: body")
        failed = line_about(log, "forwarding failed")
    assert (refused["round"], refused["request"], refused["severity"]) == ("uid-1", "r-2", "warn")
    assert unread["round"] == "uid-1"
    assert unread["request"].isalnum()  # a new one, since what was sent could be anything
    assert (failed["round"], failed["slot"]) == ("uid-1", 1)
    assert "request" not in failed
