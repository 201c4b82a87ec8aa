# SPDX-License-Identifier: Apache-2.0
"""The comparison before an upgrade, run by bash on what the pinned Helm prints: it shows what changes alone."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks

pytestmark = pytest.mark.timeout(120, func_only=True)

NAMESPACE = ("--namespace", "poc-system")
#: Without a Secret of the chart: there is no cluster from which Helm could take its content.
VALUES = f"--values={ROOT / 'docs/examples/values/gitops.yaml'}"
#: Helm of a cluster with a release: an upgrade's dry run there prints what an installation's does without one.
_HELM = """
helm() {
    case "$1" in
        get) cat release.yaml ;;
        *) cat dry-run.txt ;;
    esac
}
"""


def _helm(helm: Path, *words: str) -> str:
    """Run helm, which finds no cluster."""
    command: list[str | Path] = [
        helm,
        *words,
        "vllm-poc-operator",
        ROOT / "charts/vllm-poc-operator",
        *NAMESPACE,
        VALUES,
    ]
    environ = {**os.environ, "KUBECONFIG": os.devnull}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def released(helm: Path) -> str:
    """What the page's release consists of, as `helm get manifest` prints it: the objects without the hooks."""
    return _helm(helm, "template", "--no-hooks")


def _compared(folder: Path, released: str, dry_run: str) -> tuple[int, list[str]]:
    (block,) = [block for block in blocks() if block.page.name == "upgrade.md" and "--dry-run" in block.text]
    (folder / "release.yaml").write_text(released)
    (folder / "dry-run.txt").write_text(dry_run)
    # `helm template` ends without the blank line that `helm get manifest` and a dry run have.
    script = _HELM + block.text.replace("diff ", "diff --ignore-blank-lines ", 1)
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, [line for line in done.stdout.splitlines() if line[:1] in "<>"]


def test_nothing_is_shown_where_nothing_changes(helm: Path, released: str, tmp_path: Path) -> None:
    printed = _helm(helm, "install", "--dry-run=client")
    assert "HOOKS:" in printed
    assert _compared(tmp_path, released, printed) == (0, [])


def test_a_change_is_shown_alone(helm: Path, released: str, tmp_path: Path) -> None:
    printed = _helm(helm, "install", "--dry-run=client", "--set=networkPolicy.enabled=false")
    code, lines = _compared(tmp_path, released, printed)
    assert code == 1
    assert "<   name: vllm-poc-operator" in lines
    assert [line for line in lines if not line.startswith("<")] == []
    assert [line for line in lines if "kind:" in line] == ["< kind: NetworkPolicy"]
