# SPDX-License-Identifier: Apache-2.0
"""What the demo says before it begins and when it has ended."""

import subprocess
from pathlib import Path

import pytest

from hack.demo.guide import introduction, next_steps

STEPS = next_steps(
    kubectl=Path("/a folder/kubectl"),
    kubeconfig=Path("/a folder/admin.conf"),
    system="poc-system",
    namespace="poc-demo",
    gateway="vllm-poc-operator-gateway",
)


def test_the_demo_says_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_HOME", str(tmp_path))  # nothing has run there yet
    assert "some 10 minutes" in introduction(["kubernetes", "helm"])
    assert "some 2 minutes" in introduction(["etcd"])
    assert "build kubernetes, helm from source" in introduction(["kubernetes", "helm"])
    assert "takes about a minute on" in introduction([])
    assert "from source" not in introduction([])


def test_its_end_leads_to_the_web_page_and_the_live_view() -> None:
    text = "\n".join(STEPS)
    assert "http://localhost:8080/web/" in text
    assert "port-forward service/vllm-poc-operator-gateway 8080" in text
    assert "kubectl poc -n poc-demo status -w" in text


def test_its_lines_may_be_pasted() -> None:
    """kubectl stands for itself here, and prints what it was called with."""
    lines = [line for line in STEPS if not line.startswith("alias")]
    script = "\n".join(['kubectl() { echo kubectl "$@"; }; base64() { cat; }', *lines])
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kubectl -n poc-demo describe pocround demo" in done.stdout


def test_a_cluster_of_the_user_needs_no_kubeconfig() -> None:
    steps = next_steps(kubectl="kubectl", kubeconfig=None, system="a", namespace="b", gateway="c")
    assert not [line for line in steps if "KUBECONFIG" in line]
