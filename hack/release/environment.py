# SPDX-License-Identifier: Apache-2.0
"""The pinned tools of a release, in a Python environment of their own, and what runs them by hand.

They are no part of the developers' environment: only a release, an audit and a look at the workflows need them.
"""

import hashlib
import shutil
import sys
from pathlib import Path

from hack.images.site import ROOT
from hack.toolchain.common import UserError, cache, exclusive, run
from hack.toolchain.steps import step
from hack.uv import uv_environment, uv_path

LOCK = ROOT / "locks" / "release.txt"
LIMIT = 300.0
AUDITED = ("operator", "gateway", "cli")
#: What pip-audit says where it has no data, which is no finding.
UNREACHABLE = ("may be blocking this service", "ConnectionError", "ServiceError")
WORKFLOWS = ROOT / ".github" / "workflows"


def tool(name: str) -> Path:
    """Return the path of a pinned tool, making the environment first where it is missing."""
    folder = cache() / "release" / hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    with exclusive("release-tools"):
        if not folder.exists():
            with step("tools of the release"):
                _make(folder)
    return folder / "bin" / name


def _make(folder: Path) -> None:
    # Its programs name their own folder: it cannot be renamed, so an unfinished one is removed.
    try:
        run([uv_path(), "venv", "--quiet", "--python", sys.executable, folder], limit=LIMIT, env=uv_environment())
        argv: list[str | Path] = [uv_path(), "pip", "sync", "--quiet", "--python", folder / "bin" / "python"]
        run([*argv, "--require-hashes", LOCK], limit=LIMIT, env=uv_environment())
    except UserError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def check_workflows() -> None:
    """Check the workflows by the schema of GitHub Actions, which the tool brings along."""
    files = sorted(WORKFLOWS.glob("*.yaml"))
    run([tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *files], limit=60)
    print(f"{len(files)} workflows follow the schema of GitHub Actions")


def audit() -> None:
    """Look the locked packages up among known vulnerabilities. UserError for a finding, and without the data."""
    for name in AUDITED:
        lock = ROOT / "locks" / f"{name}.txt"
        try:
            run([tool("pip-audit"), "--require-hashes", "--disable-pip", "--requirement", lock], limit=LIMIT)
        except UserError as error:
            if any(words in str(error) for words in UNREACHABLE):
                message = f"The data on vulnerabilities cannot be reached, so {lock.name} is not audited: go online."
                raise UserError(message) from error
            raise
        print(f"{lock.name}: no known vulnerability")
