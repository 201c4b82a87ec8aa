# SPDX-License-Identifier: Apache-2.0
"""``python -m hack.generate [--verify]``."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from hack.generate import crds, dashboards, reference, releases, runbooks, values
from hack.vllm.environment import VERSIONS
from hack.vllm.runs import read_runs
from poc_operator.apis.v1alpha1.calibration import PoCCalibration
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.meta import Resource
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.validation import PoCValidation

ROOT = Path(__file__).parents[2]
#: The kinds that ask pods to work, and all kinds.
WORK: tuple[type[Resource], ...] = (PoCRound, PoCValidation, PoCCalibration)
KINDS: tuple[type[Resource], ...] = (*WORK, PoCFleet)
#: Folders with generated files, and what is in each of these: one that nothing writes any more is left over.
DASHBOARDS = "charts/vllm-poc-operator/files/dashboards"
FOLDERS = ("crds", "charts/vllm-poc-operator/files/crds", DASHBOARDS, "docs/reference", runbooks.FOLDER)
MARK = "Written by `make generate`"


def files() -> Mapping[str, str]:
    """Return what every generated file must contain, by its path in the repository."""
    found: dict[str, str] = {}
    for kind in KINDS:
        source = kind.__module__
        manifest = crds.render(kind, source=source)
        found[f"crds/{crds.file_name(kind)}"] = manifest
        found[f"charts/vllm-poc-operator/files/crds/{crds.file_name(kind)}"] = manifest
        found[f"docs/reference/{kind.KIND.singular}.md"] = reference.render(kind, source=source)
    found["docs/reference/values-vllm-poc-operator.md"] = values.render(ROOT / "charts" / "vllm-poc-operator")
    found["charts/vllm-poc-operator/README.md"] = values.readme(ROOT / "charts" / "vllm-poc-operator")
    found["docs/reference/releases.md"] = releases.render(read_runs(), VERSIONS)
    for dashboard in dashboards.DASHBOARDS:
        found[f"{DASHBOARDS}/{dashboard.name}.json"] = dashboards.render(dashboard)
    return found | dict(runbooks.render())


def differences(root: Path = ROOT) -> list[str]:
    """Return what differs between the repository and what would be written."""
    wanted = files()
    stale = [f"{path} is not what would be written" for path, text in wanted.items() if _content(root / path) != text]
    left = [f"{path} is left over" for path in _owned(root) if path not in wanted]
    return stale + left


def _content(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _owned(root: Path) -> list[str]:
    files = (path for folder in FOLDERS for path in (root / folder).glob("*") if path.is_file())
    return sorted(path.relative_to(root).as_posix() for path in files if MARK in path.read_text()[:200])


def write(root: Path = ROOT) -> None:
    """Write the generated files, and remove those that are left over."""
    wanted = files()
    for path in _owned(root):
        if path not in wanted:
            (root / path).unlink()
    for path, text in wanted.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def main() -> None:
    """Write the files, or say which of them differ."""
    parser = argparse.ArgumentParser(description="Write CRDs, reference pages, runbooks and dashboards.")
    parser.add_argument("--verify", action="store_true", help="write nothing; fail if a file differs")
    if not parser.parse_args().verify:
        write()
        return
    found = differences()
    if found:
        sys.exit("\n".join([*found, "run `make generate` and commit what it writes"]))


if __name__ == "__main__":
    main()
