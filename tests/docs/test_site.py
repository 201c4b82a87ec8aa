# SPDX-License-Identifier: Apache-2.0
"""The site builds without a warning, every link holds, and pages of one kind have one form."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, pages

DECISIONS = ROOT / "docs" / "develop" / "decisions"
STATUSES = {"Proposed", "Accepted", "Superseded"}
LIMIT = 100
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
#: The first word of each Mermaid diagram that the theme draws.
DIAGRAMS = ("flowchart ", "sequenceDiagram", "stateDiagram-v2", "xychart-beta")


def _build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the site's sources."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy2(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = _build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "search" / "search_index.json").is_file()


@pytest.mark.parametrize("fault", ["a page outside of the navigation", "a link to no page", "a link to no heading"])
def test_the_build_finds(fault: str, copy: Path) -> None:
    if fault == "a page outside of the navigation":
        (copy / "docs" / "forgotten.md").write_text("# Forgotten\n")
    else:
        target = "nowhere.md" if fault == "a link to no page" else "glossary.md#nothing"
        with (copy / "docs" / "index.md").open("a") as index:
            index.write(f"\n[there]({target})\n")
    done = _build(copy / "mkdocs.yml", copy / "site")
    assert done.returncode != 0


def test_a_version_of_the_site_is_added(copy: Path) -> None:
    shutil.copy2(ROOT / "Makefile", copy)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    (copy / "locks").mkdir()
    shutil.copy2(ROOT / ".venv" / ".lock", copy / "locks" / "dev.txt")
    identity = {f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    first = ["git", "commit", "--quiet", "--allow-empty", "--message", "First"]
    for command in (
        ["git", "init", "--quiet"],
        first,
        ["make", "--old-file=.venv/.lock", "docs-version", "VERSION=0.1"],
    ):
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, **identity},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    names = subprocess.run(
        ["git", "ls-tree", "--name-only", "gh-pages"], cwd=copy, capture_output=True, text=True, check=True
    )
    assert {"0.1", "latest", "versions.json", "index.html"} <= set(names.stdout.split())


def test_links_of_pages_outside_of_the_site_hold() -> None:
    """GitHub shows these pages; MkDocs does not see them."""
    outside = [page for page in pages() if not page.is_relative_to(ROOT / "docs")]
    broken = []
    for page in outside:
        for link in _LINK.findall(page.read_text()):
            if link.startswith(("http://", "https://")):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append((page.name, link))
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pictures_are_of_a_kind_that_the_site_draws() -> None:
    pictures = [block for block in blocks() if block.language == "mermaid"]
    assert [block.where for block in pictures if not block.text.startswith(DIAGRAMS)] == []


def test_the_five_pictures_are_there() -> None:
    pages_with_pictures = {block.page.stem for block in blocks() if block.language == "mermaid"}
    assert {"overview", "lifecycle", "slots", "delivery", "chat-and-poc"} <= pages_with_pictures


@pytest.mark.parametrize("page", sorted(DECISIONS.glob("20*.md")), ids=lambda page: page.stem)
def test_a_decision_has_its_form(page: Path) -> None:
    text = page.read_text()
    (status,) = re.findall(r"^\| Status \| (\w+) \|$", text, re.MULTILINE)
    (superseded,) = re.findall(r"^\| Superseded by \| (.+) \|$", text, re.MULTILINE)
    assert status in STATUSES
    assert (status == "Superseded") == (superseded != "-")
    assert f"| Date | {page.name[:10]} |" in text
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Alternatives", "Consequences"]
    title = re.match(r"# (.+)", text)
    assert title
    assert f"| [{title[1]}]({page.name}) | {status} |" in (DECISIONS / "index.md").read_text()


def test_the_changelog_is_by_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings
    form = r"\[\d+\.\d+\.\d+\] - (unreleased|\d{4}-\d{2}-\d{2})"
    assert [heading for heading in headings if not re.fullmatch(form, heading)] == []
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert headings[0].startswith(f"[{version[1]}]")


def test_lists_and_tables_are_set_off() -> None:
    """Unlike GitHub, MkDocs wants an empty line before lists and tables, and four spaces before a block in a list."""
    found = []
    for page in pages():
        lines = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            begins = (re.match(r"- |\d+\. ", line) and not re.match(r" *(?:- |\d+\. )|  ", before)) or (
                line.startswith("|") and not before.startswith("|")
            )
            if begins and before.strip():
                found.append(f"{page.relative_to(ROOT)}: {line}")
    assert found == []
    inside = [b.where for b in blocks() if re.match(r" {1,3}\S", b.page.read_text().splitlines()[b.line - 1])]
    assert inside == []
