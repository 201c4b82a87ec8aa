# SPDX-License-Identifier: Apache-2.0
"""How people get and verify a release: with the names that the workflow signs and pushes, and the build writes."""

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from hack.release.build import CHART
from hack.release.python_packages import version
from hack.release.statements import PROVENANCE, SUMS, write_sums
from tests.docs.pages import ROOT, blocks

WORKFLOW = ROOT / ".github" / "workflows" / "release.yaml"
HOME = yaml.safe_load((CHART / "Chart.yaml").read_text())["home"]


def _commands(start: str) -> list[list[str]]:
    page = ROOT / "docs" / "develop" / "releasing.md"
    return [shlex.split(c) for block in blocks() if block.page == page for c in block.commands if c.startswith(start)]


def _steps() -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text())["jobs"]["publish"]["steps"]
    return steps


def test_the_signature_is_that_of_the_workflow() -> None:
    (sign,) = [shlex.split(step["run"]) for step in _steps() if step.get("run", "").startswith("cosign ")]
    ((_, verify, file, *options),) = _commands("cosign")
    given = dict(pairwise(options))
    assert (sign[1], verify) == ("sign-blob", "verify-blob")
    assert file == sign[-1] == SUMS
    assert given["--bundle"] == sign[sign.index("--bundle") + 1]
    # Without a key the certificate names the workflow at the tag that started it.
    assert "--key" not in sign
    name = WORKFLOW.relative_to(ROOT)
    assert given["--certificate-identity"] == f"{HOME}/{name}@refs/tags/v{version()}"
    assert given["--certificate-oidc-issuer"] == "https://token.actions.githubusercontent.com"


def test_sums_are_checked_of_the_files_that_are_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    write_sums(tmp_path)
    (tmp_path / "two").unlink()
    (check,) = _commands("sha256sum")
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "one: OK\n")
    (tmp_path / "one").write_text("another")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_images_and_chart_are_pulled_from_where_they_are_pushed() -> None:
    (push,) = [step["run"] for step in _steps() if "skopeo copy" in step.get("run", "")]
    owner = f"ghcr.io/{HOME.split('/')[-2]}"
    pushed = {
        target.replace("$owner", owner).replace("$version", version()).replace("$role", "operator")
        for target in re.findall(r'"docker://([^"]+)"', push)
    }
    (inspect,) = _commands("skopeo")
    (install,) = _commands("helm")
    (chart,) = [word.removeprefix("oci://") for word in install if word.startswith("oci://")]
    given = dict(pairwise(install))
    assert {inspect[-1].removeprefix("docker://"), f"{chart}:{given['--version']}"} == pushed
    (digest,) = _commands("jq")
    assert digest[-1] == PROVENANCE
