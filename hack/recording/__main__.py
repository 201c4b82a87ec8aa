# SPDX-License-Identifier: Apache-2.0
"""python -m hack.recording: record the demo's commands on its cluster, and draw the README's picture of them.

Run it after ``make demo``, in the developers' environment: ``make recording``.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from hack.deploy.kube import Kube, current_kube, local_kube
from hack.deploy.releases import NAMESPACE
from hack.images.site import ROOT
from hack.recording import animation
from hack.recording.cast import Cast, Recorder, read
from hack.toolchain.common import UserError, main

CAST, PICTURE = ROOT / "docs" / "images" / "recording.cast", ROOT / "docs" / "images" / "recording.svg"
ROUND = "recording"
TITLE = "A round of Proof of Compute with kubectl poc"
COLUMNS, ROWS = 128, 38
#: What is typed; the round ends by itself.
COMMANDS = (
    f"kubectl -n {NAMESPACE} get pocfleets",
    f"kubectl poc round create -n {NAMESPACE} -f docs/examples/round.yaml --name {ROUND} --seconds 20 --watch",
    f"kubectl poc explain -n {NAMESPACE} {ROUND}",
    f"kubectl poc round results -n {NAMESPACE} {ROUND}",
)
#: Seconds of one command, and of the whole recording.
COMMAND_SECONDS, MOST_SECONDS = 45.0, 60.0


def program() -> None:
    """Record on the local cluster or on the user's, or take a recording that exists, and draw it."""
    parser = argparse.ArgumentParser(prog="python -m hack.recording", description=__doc__)
    parser.add_argument("--cluster", choices=["local", "current"], default="local")
    parser.add_argument("--cast", type=Path, help="draw this recording instead of a new one")
    options = parser.parse_args()
    if options.cast is None:
        recorded = record(local_kube() if options.cluster == "local" else current_kube())
        recorded.write(CAST)
    else:
        recorded = read(options.cast)
    drawn = animation.draw(recorded)
    PICTURE.write_text(drawn)
    print(f"{PICTURE.relative_to(ROOT)}: {recorded.seconds:.0f} s, {len(drawn.encode()) // 1024} KiB")


def record(kube: Kube) -> Cast:
    """Run the commands on the demo's cluster. UserError if one fails, or all of them take too long."""
    kube.kubectl("--namespace", NAMESPACE, "delete", "pocround", ROUND, "--ignore-not-found", limit=150)
    cast = Cast(COLUMNS, ROWS, TITLE)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(cast, _environment(kube, Path(folder)), ROOT)
        for command in COMMANDS:
            recorder.run(command, COMMAND_SECONDS)
    if cast.seconds > MOST_SECONDS:
        raise UserError(f"The recording takes {cast.seconds:.0f} s, more than {MOST_SECONDS:.0f}: shorten COMMANDS.")
    return cast


def _environment(kube: Kube, folder: Path) -> dict[str, str]:
    """Return an environment in which ``kubectl`` is the cluster's, and finds the plugin of this repository."""
    (folder / "kubectl").symlink_to(kube.kubectl_path)
    plugin = folder / "kubectl-poc"
    paths = os.pathsep.join(str(ROOT / name) for name in ("operator", "image"))
    script = ("#!/bin/sh", f"PYTHONPATH='{paths}' exec '{sys.executable}' -m poc_operator.cli \"$@\"", "")
    plugin.write_text("\n".join(script))
    plugin.chmod(0o755)
    return {**kube.environment, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


if __name__ == "__main__":
    main(program)
