# SPDX-License-Identifier: Apache-2.0
"""Blocks of shell without a mark run here, as a reader would run them in a fresh checkout."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, SHELL, Block, blocks

LIMIT = 100
RUN = [block for block in blocks() if block.language == SHELL and block.kind == "run"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows, as a repository of its own, with this checkout's environment."""
    folder = tmp_path_factory.mktemp("checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def test_some_blocks_run() -> None:
    assert RUN


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.where)
def test_shell_runs(block: Block, checkout: Path) -> None:
    script = f"set -euo pipefail\n{block.text}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=checkout, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
