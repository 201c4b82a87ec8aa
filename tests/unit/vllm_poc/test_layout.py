# SPDX-License-Identifier: Apache-2.0
"""Whoever looks for something finds it by the names of folders and modules."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from hack.vllm.environment import ROOT

PACKAGE = ROOT / "image" / "vllm_poc"
#: Names that two modules share because they are about the same thing on two levels.
SAME_SUBJECT = {"attention", "callbacks"}
MOST_LINES = 500


def modules() -> list[Path]:
    return [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]


def test_no_name_stands_for_two_things() -> None:
    places = defaultdict(set)
    for path in modules():
        places[path.parent.name if path.stem == "__init__" else path.stem].add(path)
    shared = {name for name, paths in places.items() if len(paths) > 1}
    assert shared == SAME_SUBJECT


def test_no_module_is_longer_than_can_be_read() -> None:
    assert [path for path in modules() if len((PACKAGE / path).read_text().splitlines()) > MOST_LINES] == []


def test_each_package_says_what_belongs_into_it() -> None:
    for path in modules():
        if path.name == "__init__.py":
            text = (PACKAGE / path).read_text()
            others = {other.stem for other in (PACKAGE / path).parent.glob("*.py")} - {"__init__", "__main__", "logs"}
            missing = {name for name in others if not re.search(rf"\b{name}\b", text)}
            assert not missing, f"{path} does not say what {missing} is for"


def test_the_page_about_porting_names_modules_that_exist() -> None:
    page = (ROOT / "docs" / "develop" / "porting.md").read_text()
    named = set(re.findall(r"`((?:server|worker)/[\w/]+\.py|\w+\.py)`", page))
    known = {path.as_posix() for path in modules()}
    assert {name for name in named if not name.startswith("test_")} <= known
    assert any(name.startswith("worker/model/") for name in named)


def test_the_page_about_porting_has_every_module_that_imports_vllm() -> None:
    page = (ROOT / "docs" / "develop" / "porting.md").read_text()
    imports = re.compile(r"^\s*(?:from|import) vllm\b(?!_poc)", re.MULTILINE)
    touching = {path.as_posix() for path in modules() if imports.search((PACKAGE / path).read_text())}
    assert {name for name in touching if f"`{name}`" not in page} == set()
    assert touching


#: Tests of the gate, of delivery and of queued requests. They set the clock that the pod goes by.
BY_A_FAKE_CLOCK = ("unit/vllm_poc/server/test_scheduler.py", "wire/test_delivery.py", "wire/test_jobs.py")
_WAITS = re.compile(r"(?<!clock\.)\bsleep\((?!0\))|\b(monotonic|perf_counter|wait_for)\b|\basyncio\.timeout\b")


@pytest.mark.parametrize("path", BY_A_FAKE_CLOCK)
def test_no_test_waits_for_the_systems_clock(path: str) -> None:
    text = (ROOT / "tests" / path).read_text()
    assert [line for line in text.splitlines() if _WAITS.search(line) and "def " not in line] == []
    assert "FakeClock" in text


@pytest.mark.parametrize("module", ["gate", "jobs", "callbacks/delivery", "callbacks/outbox"])
def test_what_waits_for_a_time_waits_by_the_servers_clock(module: str) -> None:
    text = (PACKAGE / "server" / f"{module}.py").read_text()
    patience = text.partition("class Patience")[2].partition("\nclass ")[0]  # of clients, who have no other clock
    assert not _WAITS.search(text.replace(patience, "").replace("_changed.wait_for(", ""))
