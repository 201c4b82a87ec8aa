# SPDX-License-Identifier: Apache-2.0
"""The workflow's command signs the sums of a release, and the docs' command verifies them, here with a key.

Without a key both need the transparency log and the certificates of Sigstore, which a test does not write to.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hack.release.statements import SUMS, write_sums
from hack.toolchain.tools import COSIGN, ensure_tools, tool_path
from tests.docs.test_release import sign_command, verify_command

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

#: What stands for an identity when there is a key.
KEY = {"sign": ["--key=cosign.key", "--tlog-upload=false"], "verify": ["--key=cosign.pub", "--insecure-ignore-tlog"]}

Cosign = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cosign(tmp_path: Path) -> Cosign:
    """Cosign in a folder with the sums of a file, and a pair of keys."""
    ensure_tools([COSIGN])
    (tmp_path / "one").write_text("one")
    write_sums(tmp_path)
    environment = {"HOME": str(tmp_path), "COSIGN_PASSWORD": ""}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        whole: list[str | Path] = [tool_path("cosign"), *argv]
        return subprocess.run(whole, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    made = run("generate-key-pair")
    assert made.returncode == 0, made.stderr
    return run


def test_what_the_workflow_signs_is_verified_as_the_docs_say(cosign: Cosign, tmp_path: Path) -> None:
    signed = cosign(*sign_command()[1:], *KEY["sign"])
    assert signed.returncode == 0, signed.stderr
    verify = [one for one in verify_command()[1:] if not one.startswith(("--certificate", "https://"))]
    done = cosign(*verify, *KEY["verify"])
    assert (done.returncode, "Verified OK" in done.stdout + done.stderr) == (0, True), done.stderr
    (tmp_path / SUMS).write_text("another")
    assert cosign(*verify, *KEY["verify"]).returncode != 0
