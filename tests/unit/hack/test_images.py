# SPDX-License-Identifier: Apache-2.0
"""What goes into the images, and which Python makes them."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hack.images import site as images
from hack.images.build import image_name
from hack.images.site import ROOT, Role, compile_bytecode, fingerprint, site
from hack.toolchain.common import UserError


def test_modules_are_compiled_once_and_for_all(tmp_path: Path) -> None:
    """A start of the gateway took twice the time without: its file system may only be read."""
    package = tmp_path / "package"
    package.mkdir()
    module = package / "__init__.py"
    module.write_text("VALUE = 'compiled'\n")
    compile_bytecode(tmp_path)
    # As a copy into an image may do.
    module.write_text("VALUE = 'read anew'\n")
    os.utime(module, (1, 1))
    argv = [sys.executable, "-c", "import package; print(package.VALUE)"]
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout == "compiled\n"


def _take_away_the_compiler(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    """Let this machine have a Python that is newer than the images', and ``programs`` alone."""
    monkeypatch.setattr(images, "sys", SimpleNamespace(version_info=(3, 13, 0), executable=sys.executable))
    monkeypatch.setenv("PATH", str(programs))


def _install_nothing(folder: Path, *_: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "module.py").write_text("")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages without a package index."""
    monkeypatch.setenv("POC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(images, "_install", _install_nothing)
    monkeypatch.setattr(images, "_wheel", lambda: tmp_path)


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.GATEWAY])
@pytest.mark.usefixtures("packages")
def test_an_image_is_made_without_the_images_python(
    role: Role, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_bytecode = site(role)
    names = {fingerprint(role), image_name(role, "base")}
    assert list(with_bytecode.rglob("*.pyc"))
    assert "bytecode" not in capsys.readouterr().out
    _take_away_the_compiler(monkeypatch, tmp_path)
    without = site(role)
    assert [path.name for path in without.rglob("*.py*")] == ["module.py"]
    assert f"The {role} image gets no bytecode" in capsys.readouterr().out
    # A folder or an image that has bytecode is another one.
    assert without != with_bytecode
    assert not names & {fingerprint(role), image_name(role, "base")}


def test_the_workers_image_has_no_bytecode_anyway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = fingerprint(Role.WORKER)
    _take_away_the_compiler(monkeypatch, tmp_path)
    assert fingerprint(Role.WORKER) == before


@pytest.mark.parametrize("manager", [False, True])
def test_a_release_is_never_without_bytecode(manager: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither without a program of that name, nor with one of a version manager for a version that is not chosen."""
    _take_away_the_compiler(monkeypatch, tmp_path)
    if manager:
        shim = tmp_path / f"python{images.PYTHON_VERSION}"
        shim.write_text("#!/bin/sh\nexit 127\n")
        shim.chmod(0o755)
    with pytest.raises(UserError, match="is missing, which compiles what the images have"):
        compile_bytecode(tmp_path)


def test_a_python_that_is_too_old_is_told_so_in_a_sentence() -> None:
    """In the words of any program under hack/, since Python reads this file before the program's own."""
    guard = ROOT / "hack" / "__init__.py"
    ast.parse(guard.read_text(), feature_version=(3, 6))
    old = f"import sys; sys.version_info = (3, 9, 18); exec(open({str(guard)!r}).read())"
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "needs Python 3.11 or newer" in line
    assert "is Python 3.9: " in line
