# SPDX-License-Identifier: Apache-2.0
"""The shape of the code: few modules of a good size, each with a name of its own, each folder on the map."""

import re
import statistics
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

MAP = ROOT / "docs" / "develop" / "architecture.md"
#: Package: the most modules that it should have. Room for a kind or a route; more asks for a merge first.
PACKAGES = {"image/vllm_poc": 81, "operator/poc_gateway": 72, "operator/poc_operator": 119}
LEAST_MEDIAN, LONGEST, SHORT = 120, 500, 50

#: Names that several folders of a package have, where the folder says which, reviewed one by one.
SHARED_NAMES = {
    "image/vllm_poc": {"attention"},
    "operator/poc_gateway": {"routes", "messages"},
    "operator/poc_operator": {"conditions", "gateway", "objects", "plan", "snapshot"},
}
#: Modules of fewer than 50 lines, with the reason why they stand alone.
SHORT_MODULES = {
    "image/vllm_poc/wire/client_gone.py": "both servers use it, and plans, which import the messages, do no I/O",
    "operator/poc_operator/clients/http.py": "what the siblings beside it share",
    "operator/poc_operator/controller/logs.py": "all modules of the package use it",
    "operator/poc_operator/leases.py": "what polls, which plans do not know, share with plans, which do no I/O",
}


def _modules(package: str) -> list[Path]:
    """The modules of a package, without those that hold a docstring or start a program, and without migrations."""
    found = (ROOT / package).rglob("*.py")
    return sorted(p for p in found if p.name not in {"__init__.py", "__main__.py"} and "migrations" not in p.parts)


def _lines(module: Path) -> int:
    return len(module.read_text().splitlines())


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_are_few_and_of_a_good_size(package: str) -> None:
    sizes = [_lines(module) for module in _modules(package)]
    assert len(sizes) <= PACKAGES[package]
    assert statistics.median(sizes) >= LEAST_MEDIAN
    assert max(sizes) <= LONGEST


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_has_one_meaning(package: str) -> None:
    names = Counter(module.stem for module in _modules(package))
    assert {name for name, times in names.items() if times > 1} - SHARED_NAMES[package] == set()


def test_a_short_module_has_a_reason() -> None:
    short = {str(m.relative_to(ROOT)) for package in PACKAGES for m in _modules(package) if _lines(m) < SHORT}
    assert short - set(SHORT_MODULES) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_is_on_the_map(package: str) -> None:
    text = MAP.read_text()
    folders = [folder for folder in (ROOT / package).iterdir() if (folder / "__init__.py").is_file()]
    assert [folder.name for folder in folders if f"`{folder.relative_to(ROOT)}/`" not in text] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_what_belongs_in_it(package: str) -> None:
    inits = [path for path in (ROOT / package).rglob("__init__.py") if "versions" not in path.parts]
    assert [str(path.relative_to(ROOT)) for path in inits if '"""' not in path.read_text()] == []


def _layers_of_code(package: str) -> list[set[str]]:
    """The layers that import-linter holds, lowest first."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [one["layers"] for one in config if one["type"] == "layers" and one["containers"] == [package]]
    return [set(re.split(r" *[|:] *", layer)) for layer in reversed(layers)]


@pytest.mark.parametrize("part", ["operator", "extension", "gateway"])
def test_the_layers_of_the_map_are_those_of_the_code(part: str) -> None:
    package = {"operator": "poc_operator", "extension": "vllm_poc", "gateway": "poc_gateway"}[part]
    (line,) = re.findall(rf"^{part}: +(.+)$", MAP.read_text(), re.MULTILINE)
    shown = [set(layer.split(", ")) for layer in line.strip().split(" < ")]
    # Neighbours that may not import each other stand in one layer of the map.
    assert _ordered(shown) <= _ordered(_layers_of_code(package))
    assert set().union(*shown) == set().union(*_layers_of_code(package))


def _ordered(layers: list[set[str]]) -> set[tuple[str, str]]:
    """All pairs of modules of which the second may import the first."""
    return {
        (low, high) for i, lower in enumerate(layers) for upper in layers[i + 1 :] for low in lower for high in upper
    }
