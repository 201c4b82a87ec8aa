# SPDX-License-Identifier: Apache-2.0
"""`kubectl poc` as one file that runs alone, an archive for each platform, and Krew's manifest of these archives."""

import hashlib
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hack.images.site import ROOT
from hack.release.environment import tool
from hack.release.oci import Entry, compress, tar
from hack.toolchain.common import cache, run

PROGRAM = "kubectl-poc"
LOCK = ROOT / "locks" / "cli.txt"
#: The releases of Python that the file runs with: it brings compiled libraries for each of them.
PYTHONS = ("311", "312", "313", "314")
#: Downloads of all libraries of a platform, and their archive.
LIMIT = 900.0
#: The wheel's packages that the plugin does not import.
LEFT_OUT = ("poc_gateway/",)


@dataclass(frozen=True)
class Platform:
    """An operating system and architecture, as Go calls them and as the names of wheels do."""

    system: str
    architecture: str
    wheels: str

    def archive(self, release: str) -> str:
        """The name of the platform's archive."""
        return f"{PROGRAM}-{release}-{self.system}-{self.architecture}.tar.gz"


PLATFORMS = (
    Platform("linux", "amd64", "linux-x86_64"),
    Platform("linux", "arm64", "linux-aarch64"),
    Platform("darwin", "amd64", "macosx-11.0-x86_64"),
    Platform("darwin", "arm64", "macosx-11.0-arm64"),
)


def write_plugin(out: Path, release: str, epoch: int) -> None:
    """Write an archive of the plugin for each platform into ``out``, which has the wheel."""
    (wheel,) = out.glob("*.whl")
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "sources"
        with zipfile.ZipFile(wheel) as content:
            content.extractall(sources, [name for name in content.namelist() if not name.startswith(LEFT_OUT)])
        for platform in PLATFORMS:
            program = Path(scratch) / PROGRAM
            _write_program(program, sources, platform)
            tree = {
                "LICENSE": Entry(content=(ROOT / "LICENSE").read_bytes()),
                PROGRAM: Entry(content=program.read_bytes(), mode=0o755),
            }
            (out / platform.archive(release)).write_bytes(compress(tar(tree, epoch)))


def _write_program(path: Path, sources: Path, platform: Platform) -> None:
    argv: list[str | Path] = [tool("pex"), "--output-file", path, "--pex-root", cache() / "pex"]
    argv += ["--requirement", LOCK, "--intransitive", "--wheel", "--no-build", "--sources-directory", sources]
    argv += ["--entry-point", "poc_operator.cli.program:main", "--python-shebang", "/usr/bin/env python3"]
    for python in PYTHONS:
        # Locks compare full versions; any of the series will do.
        argv += ["--platform", f"{platform.wheels}-cp-{python[0]}.{python[1:]}.0-cp{python}"]
    run([*argv, "--no-use-system-time", "--no-compile"], limit=LIMIT)


def write_krew_manifest(out: Path, release: str, downloads: str) -> None:
    """Write Krew's manifest of the archives in ``out``, which can be downloaded below the URL ``downloads``."""
    (out / "poc.yaml").write_text(yaml.safe_dump(krew_manifest(out, release, downloads), sort_keys=False))


def krew_manifest(out: Path, release: str, downloads: str) -> dict[str, Any]:
    """Return the manifest: https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/."""
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "poc"},
        "spec": {
            "version": f"v{release}",
            "homepage": downloads.partition("/releases/")[0],
            "shortDescription": "Shows Proof-of-Compute rounds on vLLM pods",
            "description": (
                "Shows what fleets of vLLM pods and Proof-of-Compute rounds do, says why,\n"
                "and names the next command.\n"
            ),
            "caveats": (
                "The plugin needs Python 3.11, 3.12, 3.13 or 3.14 as python3 on the PATH.\n"
                "So that kubectl completes it, name a folder on the PATH: kubectl poc completion ~/.local/bin\n"
            ),
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": platform.system, "arch": platform.architecture}},
                    "uri": f"{downloads}/{platform.archive(release)}",
                    "sha256": hashlib.sha256((out / platform.archive(release)).read_bytes()).hexdigest(),
                    "bin": PROGRAM,
                }
                for platform in PLATFORMS
            ],
        },
    }
