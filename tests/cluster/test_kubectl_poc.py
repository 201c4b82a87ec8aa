# SPDX-License-Identifier: Apache-2.0
"""``kubectl poc`` on the cluster, as kubectl runs it: through the API server alone."""

import base64
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hack.deploy.kube import Kube
from hack.deploy.local import FLEET
from hack.deploy.releases import NAMESPACE, SYSTEM_NAMESPACE
from tests.cluster.objects import ARTIFACT, Rounds

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300, func_only=True)]

Plugin = Callable[..., str]
_SECONDS = 60


@pytest.fixture
def plugin(kube: Kube, tmp_path: Path) -> Plugin:
    """Run ``kubectl poc``, found by kubectl on its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, call in (("kubectl-poc", "main"), ("kubectl_complete-poc", "complete")):
        script = folder / name
        script.write_text(f"#!{sys.executable}\nfrom poc_operator.cli.program import {call}\n{call}()\n")
        script.chmod(0o755)
    packages = os.pathsep.join(path for path in sys.path if path)
    environment = {**kube.environment, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": packages}

    def run(*words: str | Path, fails: bool | None = False) -> str:
        argv = [kube.kubectl_path, "poc", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment)
        assert fails is None or (done.returncode != 0) == fails, f"{done.stdout}\n{done.stderr}"
        return done.stderr if fails else done.stdout

    return run


def test_a_round_from_its_creation_to_its_results(plugin: Plugin, kube: Kube, rounds: Rounds, tmp_path: Path) -> None:
    manifest = tmp_path / "round.yaml"
    manifest.write_text(yaml.safe_dump(rounds.manifest("plugin", **ARTIFACT)))
    own = ("-n", NAMESPACE)
    assert "created (server dry run)" in plugin("round", "create", *own, "-f", manifest, "--nonces", "64", "--dry-run")
    assert "created" in plugin("round", "create", *own, "-f", manifest, "--nonces", "64")
    watched = json.loads(plugin("round", "watch", *own, "plugin", "-o", "json"))
    assert (watched["state"], watched["delivered"], watched["share"]) == ("Complete", 64, 1.0)
    assert "It is Complete" in plugin("explain", *own, "plugin")
    results = tmp_path / "results.jsonl"
    plugin("round", "export", *own, "plugin", "-f", results)
    assert len({json.loads(line)["nonce"] for line in results.read_text().splitlines()}) == 64
    shown = plugin("round", "results", *own, "plugin")
    assert all(part in shown for part in ("64 results of ", " over time"))
    archive = tmp_path / "bundle.tar.gz"
    plugin("bundle", *own, "-f", archive)
    with tarfile.open(archive) as tar:
        texts = {entry.name: tar.extractfile(entry).read().decode() for entry in tar}  # type: ignore[union-attr]
    tokens = _tokens(kube)
    assert tokens
    assert [name for name, text in texts.items() for token in tokens if token in text] == []
    assert any(name.startswith("poc-bundle/logs/") for name in texts)


def _tokens(kube: Kube) -> list[str]:
    bodies = [
        body for one in (NAMESPACE, SYSTEM_NAMESPACE) for body in kube.get("--namespace", one, "secrets")["items"]
    ]
    values = [value for body in bodies if body["type"] == "Opaque" for value in (body.get("data") or {}).values()]
    return [base64.b64decode(value).decode() for value in values]


def test_the_cluster_is_right_and_shown(plugin: Plugin) -> None:
    # Other tests have rounds that are degraded on purpose.
    found = json.loads(plugin("check", "-o", "json", fails=None))
    assert [one for one in found if one["level"] == "error" and not one["about"].startswith("round ")] == []
    assert any(one["about"].startswith("round") for one in found)
    assert any("it answers" in one["finding"] for one in found)
    shown = plugin("status", "-A")
    assert f"{NAMESPACE}/{FLEET}" in shown
    assert "error: " in plugin("explain", "-n", NAMESPACE, "nothing", fails=True)
