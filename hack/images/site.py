# SPDX-License-Identifier: Apache-2.0
"""What goes into an image: a folder with this project's wheel and, but for the worker, its locked dependencies.

The folder is made outside of the image's build, so that the build itself needs no network.
"""

import hashlib
import platform
import shutil
import sys
from enum import StrEnum
from pathlib import Path

from hack.toolchain.board import BOARD
from hack.toolchain.common import UserError, cache, exclusive, run
from hack.toolchain.steps import step
from hack.uv import uv_environment, uv_path

ROOT = Path(__file__).resolve().parents[2]
# What the images' Python must be; Debian 12's is.
PYTHON_VERSION = "3.11"
_PLATFORM = "manylinux_2_28"
LIMIT = 300.0

#: What a folder is made of beside its sources; to be changed with it, so that folders of before are not taken.
_LAYOUT, _WITHOUT_BYTECODE = "with bytecode", "without bytecode"


class Machine(StrEnum):
    """The processor of an image, as its packages name it."""

    X86_64 = "x86_64"
    AARCH64 = "aarch64"

    @classmethod
    def named(cls, name: str) -> "Machine":
        """Return the processor that Python, Linux or a registry calls ``name``; ValueError for another one."""
        return cls({"amd64": "x86_64", "arm64": "aarch64"}.get(name.lower(), name.lower()))

    @classmethod
    def of_this(cls) -> "Machine":
        """Return this machine's; UserError if there are no images for it."""
        try:
            return cls.named(platform.machine())
        except ValueError:
            raise UserError(f"there are no images for {platform.machine()}: name --machine amd64 or arm64.") from None


BUILD_LOCK = ROOT / "locks" / "build.txt"


class Role(StrEnum):
    """Which of the three images."""

    OPERATOR = "operator"
    GATEWAY = "gateway"
    WORKER = "worker"

    @property
    def lock(self) -> Path | None:
        """The dependencies that the image brings; the worker's base image has them."""
        return None if self is Role.WORKER else ROOT / "locks" / f"{self}.txt"


def site(role: Role, machine: Machine | None = None) -> Path:
    """Return the folder of the role's image, making it first where the sources have changed.

    Without a ``machine`` it is for the processor of this one.
    """
    machine = machine or Machine.of_this()
    folder = cache() / "sites" / f"{role}-{fingerprint(role, machine)}"
    with exclusive("sites"):
        if not folder.exists():
            with step(f"packages of the {role} image"):
                _make(role, machine, folder)
    return folder


def fingerprint(role: Role, machine: Machine | None = None) -> str:
    """Return a hash of everything that the role's image is made of, but for its base."""
    layout = _WITHOUT_BYTECODE if role.lock is not None and _compiler() is None else _LAYOUT
    digest = hashlib.sha256(f"{role}, {machine or Machine.of_this()}, {layout}".encode())
    for path in _sources(role):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _sources(role: Role) -> list[Path]:
    files = [ROOT / "pyproject.toml", BUILD_LOCK, *_package_files(ROOT / "image")]
    if role.lock is not None:
        files += [role.lock, *_package_files(ROOT / "operator")]
    return files


def _package_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _make(role: Role, machine: Machine, folder: Path) -> None:
    # A folder without the suffix is complete, since renaming is atomic.
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    if role.lock is not None:
        _install(unfinished, machine, "--require-hashes", "--requirement", role.lock)
    _install(unfinished, machine, _wheel())
    if role.lock is not None:  # the worker's base has its own Python, of any version
        if _compiler() is None:
            missing = f"no python{PYTHON_VERSION} runs here"
            BOARD.say(f"The {role} image gets no bytecode, and its containers start more slowly: {missing}.")
        else:
            compile_bytecode(unfinished)
    unfinished.rename(folder)


def compile_bytecode(folder: Path, target: str | None = None) -> None:
    """Write the bytecode of all modules beside them: the image's user cannot, and each start would compile them anew.

    It is taken as it is, since a copy into an image may change when a file was written, and it is the same whenever it
    is made. It names the files as they lie in ``folder``, or below ``target``, an absolute path of the image. UserError
    without a Python of the images' version.
    """
    compiler = _compiler()
    if compiler is None:
        raise UserError(f"python{PYTHON_VERSION} is missing, which compiles what the images have: install it.")
    argv: list[str | Path] = [compiler, "-m", "compileall", "-q", "-j", "0"]
    if target is not None:
        argv += ["-s", folder, "-p", target]
    argv += ["--invalidation-mode", "unchecked-hash", folder]
    # Sets of constants are stored in the order of their hashes.
    run(argv, limit=LIMIT, env={**uv_environment(), "PYTHONHASHSEED": "0"})


def _compiler() -> str | None:
    """Return a Python of the images' version, which compiles what they have. None without one that runs."""
    if ".".join(map(str, sys.version_info[:2])) == PYTHON_VERSION:
        return sys.executable
    found = shutil.which(f"python{PYTHON_VERSION}")
    try:
        if found is not None:  # a version manager has programs of this name for versions that are not chosen
            run([found, "-c", ""], limit=LIMIT)
    except UserError:
        return None
    return found


def _install(folder: Path, machine: Machine, *what: str | Path) -> None:
    argv: list[str | Path] = [uv_path(), "pip", "install", "--quiet", "--no-deps", "--target", folder]
    argv += [
        "--python-version",
        PYTHON_VERSION,
        "--python-platform",
        f"{machine}-{_PLATFORM}",
        "--only-binary",
        ":all:",
    ]
    run([*argv, *what], limit=LIMIT, env=uv_environment(), cwd=ROOT)


def _wheel() -> Path:
    """Build this project's wheel with the locked build backend."""
    out = cache() / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    argv: list[str | Path] = [uv_path(), "build", "--quiet", "--wheel", "--out-dir", out]
    run(
        [*argv, "--build-constraints", BUILD_LOCK, "--require-hashes"],
        limit=LIMIT,
        env=uv_environment(),
        cwd=ROOT,
    )
    return next(out.glob("*.whl"))
