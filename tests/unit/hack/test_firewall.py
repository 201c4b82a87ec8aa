# SPDX-License-Identifier: Apache-2.0
"""A cluster is removed by what has made it, also if other versions of its tools are pinned by now."""

import os
from pathlib import Path

import pytest

from hack.cluster import firewall


@pytest.mark.parametrize("built", [[], ["old"], ["old", "new"]])
def test_rules_are_removed_by_the_newest_kube_proxy_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: list[str]
) -> None:
    monkeypatch.setenv("POC_HOME", str(tmp_path))
    called = list[list[str]]()

    def run(argv: list[object], limit: float) -> str:
        called.append([str(word) for word in argv])
        return ""

    monkeypatch.setattr(firewall, "run", run)
    for age, name in enumerate(built):
        program = tmp_path / "cache" / "tools" / f"kubernetes-{name}" / "kube-proxy"
        program.parent.mkdir(parents=True)
        program.touch()
        os.utime(program, (age, age))
    firewall.remove_firewall()
    cleaned = [argv[0] for argv in called if argv[1:] == ["--cleanup"]]
    assert cleaned == [f"{tmp_path}/cache/tools/kubernetes-{name}/kube-proxy" for name in built[-1:]]
