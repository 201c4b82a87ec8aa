# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.images: build the images and print their names. "site ROLE" prints a build context instead."""

import argparse
import contextlib
import sys

from hack.images.build import build
from hack.images.site import Machine, Role, site
from hack.toolchain.common import main


def program() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.images", description=__doc__)
    parser.add_argument("--base", help="base image in our buildah storage (default: a Debian image made here)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    context = commands.add_parser("site", help="print the folder to build the role's image from, with any builder")
    machine_help = "processor of the image (default: that of this machine)"
    context.add_argument("--machine", choices=["amd64", "arm64"], help=machine_help)
    context.add_argument("role", choices=list(Role), type=Role)
    options = parser.parse_args()
    # Progress must not end up in $(python3 -m hack.images ...).
    with contextlib.redirect_stdout(sys.stderr):
        if options.command == "site":
            machine = Machine.named(options.machine) if options.machine else None
            lines = [str(site(options.role, machine))]
        else:
            lines = [build(role, options.base) for role in Role]
    print("\n".join(lines))


if __name__ == "__main__":
    main(program)
