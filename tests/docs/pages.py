# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, and their fenced blocks.

An HTML comment on the line above a fence says how the block is tested:

- ``<!-- test: cluster -->``: runs on a real cluster (``pytest -m cluster tests/docs``).
- ``<!-- test: none, REASON -->``: does not run; only the names in it are checked.

A fence with a title (``yaml title="round.yaml"``) is a file that the reader saves under that name.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>\w*)(?P<rest>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_MARK = re.compile(r"^ *<!-- test: (?P<kind>cluster|none)(?:, (?P<reason>.+))? -->$")

#: The pages of docs/ with blocks for a cluster, in the order in which they are read.
CLUSTER_PAGES = (
    "start/quick-start.md",
    "operate/rounds.md",
    "operate/gateway.md",
    "operate/web-page.md",
    "develop/local-cluster.md",
    "operate/uninstall.md",
)

SHELL = "sh"
TRANSCRIPT = "console"


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page. ``line`` counts from 1 and is that of the opening fence."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    kind: str  # "run", "cluster" or "none"
    reason: str | None

    @property
    def where(self) -> str:
        """Page and line, as an editor understands them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The shell commands, one an entry: continued lines joined, output and comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == TRANSCRIPT:
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif self.language != SHELL:
            lines = []
        return [line for line in (raw.split("    #")[0].strip() for raw in lines) if line and not line.startswith("#")]


def pages() -> list[Path]:
    """Every page that people read: the repository's own and the site's."""
    top = [
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "hack/cluster/README.md")
    ]
    return top + sorted((ROOT / "docs").rglob("*.md"))


@cache
def blocks() -> tuple[Block, ...]:
    """Every fenced block of every page, in the order of reading."""
    return tuple(block for page in pages() for block in _blocks_of(page))


def _blocks_of(page: Path) -> Iterator[Block]:
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    before = ""
    for number, line in lines:
        opening = _FENCE.match(line)
        if opening is None:
            before = line
            continue
        indent = opening["indent"]
        body = []
        for _, inner in lines:
            if inner.strip() == opening["ticks"]:
                break
            body.append(inner.removeprefix(indent))
        title, mark = _TITLE.search(opening["rest"]), _MARK.match(before)
        yield Block(
            page=page,
            line=number,
            language=opening["language"],
            title=title[1] if title else None,
            text="\n".join(body) + "\n",
            kind=mark["kind"] if mark else "run",
            reason=mark["reason"] if mark else None,
        )
        before = ""
