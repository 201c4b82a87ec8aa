# SPDX-License-Identifier: Apache-2.0
"""What stops the demo says so in one clear sentence, with the remedy."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hack.cluster import ports
from hack.cluster.health import CommandCheck
from hack.cluster.parts import Part
from hack.toolchain import common, tools
from hack.toolchain.common import UserError
from hack.toolchain.steps import follow
from tests.support.servers.http_server import free_port

ROOT = Path(__file__).parents[3]


def demo(*arguments: str, path: str = "/usr/bin:/bin") -> str:
    """Run the demo with only these folders on the PATH; return its error line."""
    done = subprocess.run(
        [sys.executable, "-m", "hack.demo", *arguments],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_values_are_asked_for() -> None:
    assert "error: OPERATOR_VALUES is not set" in demo("--cluster", "current")


def test_values_must_exist(tmp_path: Path) -> None:
    missing = str(tmp_path / "values.yaml")
    line = demo("--cluster", "current", "--operator-values", missing, "--fleet", missing)
    assert line == f"error: OPERATOR_VALUES: {missing} does not exist."


def test_kubectl_is_asked_for(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.touch()
    arguments = ("--cluster", "current", "--operator-values", str(values), "--fleet", str(values))
    assert "kubectl is not on the PATH: install it" in demo(*arguments, path=str(tmp_path))


def test_a_fleet_is_asked_for(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.touch()
    line = demo("--cluster", "current", "--operator-values", str(values))
    assert line == "error: FLEET is not set: name the file of a PoCFleet, as in docs/start/quick-start.md."


@pytest.mark.parametrize(("name", "served"), [("other", "demo"), ("demo", "other")])
def test_the_fleet_must_be_that_of_the_example_round(tmp_path: Path, name: str, served: str) -> None:
    manifest = tmp_path / "fleet.yaml"
    manifest.write_text(json.dumps({"kind": "PoCFleet", "metadata": {"name": name}, "spec": {"servedName": served}}))
    for program in ("kubectl", "helm"):
        # As kubectl shows a manifest that it would create; a cluster is not asked.
        (tmp_path / program).write_text(f'#!/bin/sh\ncase "$1" in create) cat {manifest};; esac\n')
        (tmp_path / program).chmod(0o755)
    arguments = ("--cluster", "current", "--operator-values", str(manifest), "--fleet", str(manifest))
    assert demo(*arguments, path=f"{tmp_path}:/usr/bin:/bin") == (
        f'error: FLEET: {manifest} must have one PoCFleet with the name "demo" and servedName "demo", '
        "which the example round asks for."
    )


def test_go_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POC_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="The Go toolchain is missing: install Go"):
        tools.ensure_tools()


def test_a_tool_that_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POC_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"kubectl is not built yet: run python3 -m hack\.toolchain"):
        tools.tool_path("kubectl")


def test_a_port_in_use_is_named_with_its_owner() -> None:
    port = free_port()
    part = Part(name="some part", argv=("true",), check=CommandCheck(("true",)), ports=(port,))
    ports.require_free_ports([part])
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        sentence = rf"Port {port} of some part is in use by \S+ \(process {os.getpid()}\): stop that first"
        with pytest.raises(UserError, match=sentence):
            ports.require_free_ports([part])


def test_a_command_that_fails_shows_its_last_words() -> None:
    with pytest.raises(UserError, match=re.compile("exit status 3:\nbad luck", re.MULTILINE)):
        common.run(["sh", "-c", "echo bad luck; exit 3"], limit=5)


def test_a_command_that_hangs_is_ended() -> None:
    with pytest.raises(UserError, match=r"did not end within 0 s"):
        common.run(["sleep", "60"], limit=0.2)


def test_what_never_gets_ready_tells_what_was_last_seen() -> None:
    with pytest.raises(UserError, match="pods did not get ready within 0 s; last seen: 0 of 2"):
        follow("pods", lambda: (False, "0 of 2"), limit=0)
