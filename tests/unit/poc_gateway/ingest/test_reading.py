# SPDX-License-Identifier: Apache-2.0
"""What a malformed message may cost."""

import os
import subprocess
import sys

import pytest

from poc_gateway.ingest.deliveries import MOST_MALFORMED, MOST_VALUES
from tests.support.builders.deliveries import a_round, artifacts, encoded
from tests.unit.poc_gateway.ingest.conftest import Start

#: Tells by how many KiB the process has grown at most while it read a message.
MEASURE = """
import sys
from pathlib import Path
from poc_gateway.ingest.deliveries import parse_artifacts
from poc_gateway.errors import Refusal

def largest():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

body, before = sys.stdin.buffer.read(), largest()
try:
    parse_artifacts(body)
except Refusal:
    print(largest() - before)
"""


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_nothing_but_bad_entries_is_given_up(start: Start) -> None:
    items = [{"nonce": 0, "vector_b64": encoded(0)}, *[0] * MOST_MALFORMED]
    async with start(a_round()) as gateway:
        status, body = await gateway.deliver(artifacts([], artifacts=items))
        assert (status, body["stored"], len(body["refused"])) == (200, 1, MOST_MALFORMED)
        status, body = await gateway.deliver(artifacts([], artifacts=[*items, 0]))
    assert (status, body["reason"]) == (400, "ArtifactsRefused")
    assert f"more than {MOST_MALFORMED} of the artifacts cannot be read" in body["detail"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("end", ["generated", "validated"])
@pytest.mark.parametrize("value", [0, [], {}])
async def test_a_message_of_too_many_values_is_refused(start: Start, end: str, value: object) -> None:
    async with start(a_round()) as gateway:
        status, body = await gateway.deliver(artifacts([], extra=[value] * MOST_VALUES), end=end)
        assert (status, body["reason"]) == (413, "BodyTooLarge")
        # Far more than pods send.
        assert (await gateway.deliver(artifacts(range(100_000))))[0] == 200


@pytest.mark.parametrize("entry", [b"0", b"[]", b"{}"])
def test_bad_entries_take_no_memory(entry: bytes) -> None:
    body = artifacts([]).replace(b'"artifacts": []', b'"artifacts": [' + b",".join([entry] * 200_000) + b"]")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, input=body, stdout=subprocess.PIPE, check=True, env=environment)
    assert int(done.stdout) < 32 * 1024
