# SPDX-License-Identifier: Apache-2.0
"""The four starts: short, without root, and each figure of the pages about operation is one that was measured."""

import re
from pathlib import Path

import pytest
import yaml

from hack.images.site import Machine
from hack.toolchain.common import UserError
from tests.docs.pages import ROOT, SHELL, blocks
from tests.docs.schemas import manifest_errors, values_errors

DOCS = ROOT / "docs"
LAPTOP = DOCS / "examples" / "laptop"
STARTS = ("laptop", "quick-start", "own-vllm", "docker-compose")
MOST_COMMANDS = 10


def _commands(page: str) -> list[str]:
    return [
        command
        for block in blocks()
        if block.page.name == page and block.language == SHELL
        for command in block.commands
    ]


def test_a_laptop_needs_ten_commands_and_no_root() -> None:
    commands = _commands("laptop.md")
    assert len(commands) <= MOST_COMMANDS
    assert not re.search(r"\bsudo\b|\bnvidia", " ".join(commands))


def test_the_laptops_files_are_valid() -> None:
    for path in sorted(LAPTOP.glob("*.yaml")):
        body = yaml.safe_load(path.read_text())
        found = manifest_errors(body) if "kind" in body else values_errors("vllm-poc-operator", body)
        assert found == [], path.name
    used = {Path(name).name for command in _commands("laptop.md") for name in re.findall(r"docs/examples/\S+", command)}
    assert used == {path.name for path in LAPTOP.glob("*.yaml")}


@pytest.mark.parametrize("page", STARTS)
def test_each_start_leads_on_and_is_found(page: str) -> None:
    assert f"(start/{page}.md)" in (DOCS / "index.md").read_text()
    assert f"start/{page}.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize(
    ("name", "machine"),
    [("x86_64", Machine.X86_64), ("AMD64", Machine.X86_64), ("arm64", Machine.AARCH64), ("aarch64", Machine.AARCH64)],
)
def test_images_are_for_the_processor_of_the_machine(
    name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: name)
    assert Machine.of_this() is machine


def test_a_processor_without_images_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(UserError, match="riscv64"):
        Machine.of_this()


def test_every_figure_of_the_sizing_was_measured() -> None:
    measured = (DOCS / "benchmarks.md").read_text()
    rows = re.findall(r"^\| [^|]*(?:rounds?|stored|memory of)[^|]*\| ([^|]+) \| ([^|]+) \|$", _sizing(), re.MULTILINE)
    figures = [cell for row in rows for cell in row if re.match(r"\d", cell)]
    assert len(figures) >= 12
    assert [figure for figure in figures if figure not in measured] == []


def _sizing() -> str:
    return (DOCS / "operate" / "sizing.md").read_text()
