# SPDX-License-Identifier: Apache-2.0
"""What the demo says before it begins and when it has ended."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hack.demo.guide import introduction, next_steps, plugin_steps
from hack.images.site import ROOT

INSTALLED = next_steps(
    kubectl=Path("/a folder/kubectl"),
    kubeconfig=Path("/a folder/admin.conf"),
    system="poc-system",
    namespace="poc-demo",
    gateway="vllm-poc-operator-gateway",
    plugin=[],
)
#: They stand for the programs. kubectl prints what it was called with, or calls the plugin, as it does.
STANDING_FOR = """
kubectl() {
  if [ "$1" = poc ]; then kubectl-poc "${@:2}"; else echo kubectl "$@"; fi
  for word; do case "$word" in *.yaml) test -f "$word" || exit 3;; esac; done
}
base64() { cat; }
python3() {
  mkdir -p "$3/bin"
  printf '#!/bin/sh\nfor word; do case "$word" in *.txt|.) test -e "$word" || exit 4;; esac; done\n' >"$3/bin/pip"
  printf '#!/bin/sh\necho kubectl-poc "$@"\n' >"$3/bin/kubectl-poc"
  cp "$3/bin/kubectl-poc" "$3/bin/kubectl_complete-poc"
  chmod +x "$3"/bin/*
}
"""


def test_the_demo_says_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_HOME", str(tmp_path))  # nothing has run there yet
    assert "some 10 minutes" in introduction(["kubernetes", "helm"])
    assert "some 2 minutes" in introduction(["etcd"])
    assert "build kubernetes, helm from source" in introduction(["kubernetes", "helm"])
    assert "takes about a minute on" in introduction([])
    assert "from source" not in introduction([])


def test_its_end_leads_to_the_web_page_and_the_live_view() -> None:
    text = "\n".join(INSTALLED)
    assert "http://localhost:8080/web/" in text
    assert "port-forward service/vllm-poc-operator-gateway 8080" in text
    assert "kubectl poc -n poc-demo status -w" in text


def paste(steps: Sequence[str], home: Path) -> str:
    """Run the lines in the repository's root, and return what they print."""
    lines = [line for line in steps if not line.startswith("alias")]
    script = "\n".join([STANDING_FOR, *lines])
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_lines_may_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those that install the plugin, on a machine that has none; and once more after that."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    steps = next_steps(
        kubectl="kubectl",
        kubeconfig=None,
        system="poc-system",
        namespace="poc-demo",
        gateway="g",
        plugin=plugin_steps(),
    )
    for _ in range(2):
        told = paste(steps, tmp_path)
        assert "kubectl -n poc-demo describe pocround demo" in told
        assert "kubectl-poc -n poc-demo status -w" in told


def test_a_plugin_that_is_there_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert any(line.endswith("pip install --no-deps .") for line in plugin_steps())
    program = tmp_path / "kubectl-poc"
    program.write_text("#!/bin/sh\necho kubectl-poc $@\n")
    program.chmod(0o755)
    assert plugin_steps() == []
    assert "kubectl-poc -n poc-demo status -w" in paste(INSTALLED, tmp_path)


def test_a_cluster_of_the_user_needs_no_kubeconfig() -> None:
    steps = next_steps(kubectl="kubectl", kubeconfig=None, system="a", namespace="b", gateway="c", plugin=[])
    assert not [line for line in steps if "KUBECONFIG" in line]
