# SPDX-License-Identifier: Apache-2.0
"""The group that all pods of the local cluster are under, on stand-ins of the kernel's files."""

from pathlib import Path

import pytest

from hack.cluster import cgroups
from hack.cluster.layout import OWN_NAME


@pytest.mark.parametrize(
    ("files", "weight", "cores", "found"),
    [
        (("cpu/{}/cpu.shares", "memory/{}/memory.limit_in_bytes"), "cpu/{}/cpu.shares", 4, "4096"),
        (("cgroup.controllers", "{}/cpu.weight"), "{}/cpu.weight", 4, "400"),
        # The kernel takes no more.
        (("cgroup.controllers", "{}/cpu.weight"), "{}/cpu.weight", 128, "10000"),
    ],
)
def test_pods_weigh_as_much_as_the_machine_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], weight: str, cores: int, found: str
) -> None:
    for file in files:
        path = tmp_path / file.format(OWN_NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    cgroups.ensure_group()
    assert (tmp_path / weight.format(OWN_NAME)).read_text() == found
