# SPDX-License-Identifier: Apache-2.0
"""Two builds in two homes give the same bytes, and what is in the images starts."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hack.images.site import ROOT
from hack.release.kubectl_plugin import PLATFORMS, PYTHONS
from hack.release.python_packages import version
from hack.toolchain.tools import KREW, ensure_tools, tool_path
from tests.support.fakes.api_paths import api_paths
from tests.unit.poc_operator.cli import seen

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

#: Where nothing can be downloaded.
DOWNLOADS = "https://git.invalid/owner/name/releases/download/v1"
#: What each program loads first, with all its compiled libraries.
IMPORTS = {
    "operator": "import kopf, aiohttp, ssl, poc_operator.handlers",
    "gateway": "import psycopg, pyarrow.parquet, sqlite3, uvloop, httptools, poc_gateway.server",
}


def _build(out: Path, home: Path | None) -> Path:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    if home is not None:
        environment["POC_HOME"] = str(home)
    argv = [sys.executable, "-m", "hack.release", "build", "--out", str(out), "--downloads", DOWNLOADS]
    subprocess.run(argv, check=True, cwd=ROOT, env=environment)
    return out


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("release") / "out", None)


def test_two_builds_give_the_same_bytes(release: Path, tmp_path: Path) -> None:
    again = _build(tmp_path / "out", tmp_path / "home")
    assert (again / "SHA256SUMS").read_text() == (release / "SHA256SUMS").read_text()
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=again, check=True)


@pytest.mark.parametrize("role", IMPORTS)
def test_the_program_of_an_image_starts(role: str, release: Path, tmp_path: Path) -> None:
    _unpack(release / f"vllm-poc-{role}-{version()}.oci.tar", tmp_path)
    tmp_path.chmod(0o755)  # the image's user must be let into its root
    argv = ["chroot", "--userspec=65532:65532", str(tmp_path), "/usr/bin/python3", "-c", IMPORTS[role]]
    # The path is also the one on which chroot itself is looked for.
    environment = {"PYTHONPATH": f"/opt/vllm-poc-{role}", "LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin"}
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_krew_installs_the_plugin(release: Path, tmp_path: Path) -> None:
    """From the archive, with no other package of Python's than those in it."""
    ensure_tools([KREW])
    bare = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin"}
    archive = release / f"kubectl-poc-{version()}-linux-amd64.tar.gz"
    argv: list[str | Path] = [
        tool_path("krew"),
        "install",
        f"--manifest={release / 'poc.yaml'}",
        f"--archive={archive}",
    ]
    installed = subprocess.run(argv, env=bare, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    plugin = tmp_path / ".krew" / "bin" / "kubectl-poc"
    listed = subprocess.run(
        [plugin, "fleet", "presets", "-o", "json"], env=bare, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stderr
    assert "minimax-m2.7" in {preset["name"] for preset in json.loads(listed.stdout)}
    with api_paths() as api:
        api.answers |= seen.a_gateway() | seen.stored_results()
        drawn = tmp_path / "plots.png"
        argv = [plugin, "round", "results", "round-1", "--png", drawn, "--kubeconfig", api.kubeconfig(tmp_path / "k")]
        shown = subprocess.run(argv, env=bare, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_the_plugin_has_compiled_libraries_for_each_release_of_python(release: Path) -> None:
    for platform in PLATFORMS:
        with tarfile.open(release / platform.archive(version())) as archive:
            program = archive.extractfile("kubectl-poc")
            assert program is not None
            names = {
                name.split("/")[1] for name in zipfile.ZipFile(io.BytesIO(program.read())).namelist() if "/" in name
            }
        for python in PYTHONS:
            assert any(name.startswith("pydantic_core-") and f"-cp{python}-" in name for name in names), (
                platform,
                names,
            )


def _unpack(archive: Path, root: Path) -> None:
    """Unpack the image for the machine that the tests run on, which is amd64, as the images' first one is."""
    with tarfile.open(archive) as opened:
        files = {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]

    def blob(digest: str) -> bytes:
        return files[f"blobs/{digest.replace(':', '/')}"]

    (named,) = json.loads(files["index.json"])["manifests"]
    first = json.loads(blob(named["digest"]))["manifests"][0]
    for layer in json.loads(blob(first["digest"]))["layers"]:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob(layer["digest"])))) as content:
            content.extractall(root, filter="tar")
