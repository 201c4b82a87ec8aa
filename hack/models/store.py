# SPDX-License-Identifier: Apache-2.0
"""Keep the tiny models in the home folder, under a name that changes with whatever made them."""

import hashlib
import os
import shutil
from pathlib import Path

from hack.toolchain.common import cache, exclusive, run
from hack.toolchain.steps import step
from hack.vllm.environment import ROOT, environment, fingerprint

# Apache License 2.0: English, at hand, and never edited.
CORPUS = ROOT / "LICENSE"
WRITE_SECONDS = 120


def models() -> Path:
    """Return the folder with the tiny models, writing them first where they are missing."""
    folder = cache() / "models" / _fingerprint()
    with exclusive("models"):
        if not folder.exists():
            _write(folder)
    return folder


def _fingerprint() -> str:
    sources = [CORPUS, *sorted(Path(__file__).parent.glob("*.py"))]
    parts = [fingerprint().encode(), *(source.read_bytes() for source in sources)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _write(folder: Path) -> None:
    # A folder without the suffix is complete, since renaming is atomic.
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    argv: list[str | Path] = [environment() / "bin" / "python", "-m", "hack.models.write", CORPUS, unfinished]
    with step("tiny models"):
        run(argv, limit=WRITE_SECONDS, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    unfinished.rename(folder)
