# SPDX-License-Identifier: Apache-2.0
"""The wheel, the source archive, and the layer of an image that holds them with all that they need."""

import shutil
import tempfile
import tomllib
import zipfile
from pathlib import Path

from hack.images.site import BUILD_LOCK, ROOT, Machine, Role, compile_bytecode, site
from hack.release.oci import Entry, Tree
from hack.toolchain.common import UserError, run
from hack.uv import uv_environment, uv_path

LIMIT = 300.0
#: The machine that the header of a compiled library must name, by architecture (e_machine of ELF).
MACHINES = {"amd64": 62, "arm64": 183}
#: What the installer notes about itself: paths and times of the machine that built.
NOTES = ("direct_url.json", "uv_build.json", "uv_cache.json", "RECORD")


def version() -> str:
    """Return the version that everything of a release has: the one in pyproject.toml."""
    found: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return found


def build_packages(out: Path, epoch: int) -> None:
    """Write the wheel and the source archive, as of ``epoch`` (seconds)."""
    argv: list[str | Path] = [uv_path(), "build", "--quiet", "--out-dir", out, "--build-constraints", BUILD_LOCK]
    environment = {**uv_environment(), "SOURCE_DATE_EPOCH": str(epoch)}
    run([*argv, "--require-hashes"], limit=LIMIT, env=environment, cwd=ROOT)
    (out / ".gitignore").unlink(missing_ok=True)  # of uv


def application_tree(role: Role, architecture: str, wheel: Path) -> Tree:
    """Return the files of the role's image beside its base: ``wheel`` and the locked packages.

    UserError for a library of another architecture.
    """
    target = f"opt/vllm-poc-{role}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "site"
        leave_out = shutil.ignore_patterns("__pycache__", *NOTES)
        shutil.copytree(site(role, Machine.named(architecture)), folder, ignore=leave_out)
        shutil.rmtree(folder / "bin", ignore_errors=True)  # programs that name the Python of the machine that built
        with zipfile.ZipFile(wheel) as content:  # the folder's own copy may have the README of an older commit
            content.extractall(folder)
        for record in folder.glob("*.dist-info/RECORD"):
            record.unlink()
        compile_bytecode(folder, f"/{target}")
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        tree = {f"{target}/{path.relative_to(folder)}": Entry(content=path.read_bytes()) for path in files}
    check_machine(tree, architecture)
    return tree


def check_machine(tree: Tree, architecture: str) -> None:
    """Raise UserError if a compiled file of the tree is for another architecture."""
    for path, entry in tree.items():
        machine = int.from_bytes(entry.content[18:20], "little")
        if entry.kind == "file" and entry.content[:4] == b"\x7fELF" and machine != MACHINES[architecture]:
            raise UserError(f"/{path} is not for {architecture}: its package has no wheel for it, so pin one that has.")
