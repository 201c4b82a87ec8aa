# SPDX-License-Identifier: Apache-2.0
"""Blocks of the documentation that any machine can judge: YAML by schema, JSON by parsing, commands by their names."""

import json
import re
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import CLUSTER_PAGES, ROOT, SHELL, TRANSCRIPT, Block, blocks, pages
from tests.docs.schemas import CHARTS, GROUP, example_files, is_value, manifest_errors, values_errors

LANGUAGES = {SHELL, TRANSCRIPT, "yaml", "json", "text", "mermaid", "promql", "python"}

#: How many blocks of each page are not run at all. A new one needs a reason in the page and a line here.
NOT_RUN = {
    "CONTRIBUTING.md": 1,
    "README.md": 1,
    "docs/benchmarks.md": 24,
    "docs/develop/index.md": 1,
    "docs/develop/releasing.md": 2,
    "docs/develop/testing.md": 3,
    "docs/operate/archive.md": 3,
    "docs/operate/backup.md": 5,
    "docs/operate/chart.md": 4,
    "docs/operate/fleets.md": 3,
    "docs/operate/gitops.md": 3,
    "docs/operate/kubectl-poc.md": 3,
    "docs/operate/rounds.md": 3,
    "docs/operate/runbooks/alerts.md": 40,
    "docs/operate/runbooks/fleets.md": 31,
    "docs/operate/runbooks/work.md": 75,
    "docs/operate/upgrade.md": 2,
    "docs/operate/web-page.md": 1,
    "docs/start/docker-compose.md": 16,
    "docs/start/laptop.md": 2,
    "docs/start/own-vllm.md": 4,
    "docs/start/quick-start.md": 1,
}

YAML = [block for block in blocks() if block.language == "yaml" and block.kind != "none"]
COMMANDS = [(block, command) for block in blocks() for command in block.commands]


def _ids(found: list[Block]) -> list[str]:
    return [block.where for block in found]


def _documents(block: Block) -> list[Any]:
    return [document for document in yaml.safe_load_all(block.text) if document is not None]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_that_uses_the_function_gateway_says_where_it_is_from(page: Path) -> None:
    """It is of ours, and a reader may come to any page first."""
    text = page.read_text()
    if re.search(r'(^|`)gateway "?/', text, re.MULTILINE):
        assert "\ngateway() {" in text or "gateway.md#read-results" in text


def test_every_block_says_its_language() -> None:
    assert [block.where for block in blocks() if block.language not in LANGUAGES] == []


def test_blocks_that_do_not_run_are_counted_and_say_why() -> None:
    skipped = [block for block in blocks() if block.kind == "none"]
    assert [block.where for block in skipped if not block.reason] == []
    assert dict(Counter(str(block.page.relative_to(ROOT)) for block in skipped)) == NOT_RUN


def test_every_page_with_cluster_blocks_is_read() -> None:
    marked = {str(block.page.relative_to(ROOT / "docs")) for block in blocks() if block.kind == "cluster"}
    assert marked == set(CLUSTER_PAGES)


@pytest.mark.parametrize("block", YAML, ids=_ids(YAML))
def test_yaml_is_what_its_schema_allows(block: Block) -> None:
    for document in _documents(block):
        if block.title in CHARTS:
            assert values_errors(CHARTS[block.title], document) == []
        elif str(document.get("apiVersion", "")).startswith(f"{GROUP}/"):
            assert manifest_errors(document) == []
        else:
            assert {"apiVersion", "kind", "metadata"} <= set(document), "neither a manifest nor a chart's values"


@pytest.mark.parametrize("path", example_files(), ids=lambda path: path.name)
def test_examples_are_what_the_schema_allows(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["apiVersion"].startswith(f"{GROUP}/"):
            assert manifest_errors(document) == []
        else:
            assert path.name == "deployment.yaml"  # it shows pods without any kind of ours


def test_json_blocks_are_json() -> None:
    for block in blocks():
        if block.language == "json":
            json.loads(block.text)


def test_python_blocks_are_python() -> None:
    for block in blocks():
        if block.language == "python":
            compile(block.text, block.where, "exec")


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == SHELL], ids=lambda block: block.where)
def test_shell_is_bash(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {
        (block.where, target)
        for block, command in COMMANDS
        for target in re.findall(r"(?:^|&& |[=/] )make ((?:[a-z][a-z-]*))", command)
    } | {
        (page.name, target)
        for page in pages()
        for target in re.findall(r"`make ([a-z][a-z-]*)[^`]*`", page.read_text())
    }
    assert sorted(where for where in used if where[1] not in targets) == []


def test_every_program_of_ours_exists() -> None:
    ours = ("hack", "benchmarks", "tests", "vllm_poc", "poc_operator", "poc_gateway")
    used = {
        (page.name, module)
        for page in pages()
        for module in re.findall(r"python3? -m ([\w.]+)", page.read_text())
        if module.split(".")[0] in ours
    }
    assert sorted(where for where in used if find_spec(where[1]) is None) == []


#: Maps of the chart's values whose names mean nothing else in the pages: a fleet has `auth` and `metrics` too.
_VALUES = ("crds", "fleets", "gateway", "leaderElection", "networkPolicy", "rbac", "uninstall")
_NO_VALUES = {"gateway.example.org", "gateway.db", "gateway.db.replaced", "rbac.yaml"}


def test_every_value_of_the_chart_exists() -> None:
    """Also with a value behind it, as in `gateway.httpRoute.enabled: true`."""
    value = re.compile(rf"`((?:{'|'.join(_VALUES)})(?:\.[a-z]\w*(?:\[\])?)+)(?:[:=][^`\n]*)?`")
    named = {(str(p.relative_to(ROOT)), name) for p in pages() for name in value.findall(p.read_text())}
    assert len({name for _, name in named}) >= 20
    assert sorted(one for one in named if one[1] not in _NO_VALUES and not is_value(one[1])) == []


def test_every_path_exists() -> None:
    """A path in backquotes that begins with one of our folders is a file, a folder or a pattern that matches some."""
    folders = "|".join(("operator", "image", "crds", "charts", "docs", "tests", "benchmarks", "hack", "locks"))
    path = re.compile(rf"(?<![\w./-])((?:{folders})/[\w./*-]*)")
    missing = {
        (str(page.relative_to(ROOT)), name)
        for page in pages()
        for text in (*re.findall(r"`([^`\n]+)`", page.read_text()), *(c for b, c in COMMANDS if b.page == page))
        for name in path.findall(text)
        if not list(ROOT.glob(name.rstrip("/.")))
    }
    assert sorted(missing) == []
