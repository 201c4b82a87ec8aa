# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.release: build the release's files, pin its Debian packages, audit, or check the workflows."""

import argparse
import os
from pathlib import Path

from hack.images.site import ROOT
from hack.release.build import build
from hack.release.debian import lock
from hack.release.environment import audit, check_workflows
from hack.release.python_packages import version
from hack.release.statements import commit_time
from hack.toolchain.common import UserError, main


def program() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.release", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    builder = commands.add_parser("build", help="build all files of a release and print their folder")
    builder.add_argument("--out", type=Path, help="folder, emptied first (default: build/release/VERSION)")
    builder.add_argument(
        "--downloads", metavar="URL", help="where the files will be, for Krew's manifest (default: none)"
    )
    commands.add_parser("lock", help="pin the newest Debian packages for the images")
    commands.add_parser("audit", help="look the locked packages up among known vulnerabilities")
    commands.add_parser("check-workflows", help="check .github/workflows by the schema of GitHub Actions")
    options = parser.parse_args()
    if options.command == "build":
        out = options.out or ROOT / "build" / "release" / version()
        build(out, _epoch(), options.downloads or None)
        print(out)
    else:
        {"lock": lock, "audit": audit, "check-workflows": check_workflows}[options.command]()


def _epoch() -> int:
    """The time that all files get, in seconds: SOURCE_DATE_EPOCH, or else the time of the commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None:
        return commit_time()
    if not given.isdigit():
        raise UserError(f"SOURCE_DATE_EPOCH is {given!r}: set it to whole seconds of Unix time, or unset it.")
    return int(given)


if __name__ == "__main__":
    main(program)
