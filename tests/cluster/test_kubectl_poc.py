# SPDX-License-Identifier: Apache-2.0
"""``kubectl poc`` on the cluster, as kubectl runs it: through the API server alone."""

import base64
import json
import tarfile
from pathlib import Path

import pytest
import yaml

from hack.deploy.kube import Kube
from hack.deploy.local import FLEET
from hack.deploy.releases import NAMESPACE, SYSTEM_NAMESPACE
from tests.cluster.conftest import Plugin
from tests.cluster.objects import ARTIFACT, Rounds

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300, func_only=True)]


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
