# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.toolchain: install and build what is missing; "path NAME ..." prints where tools lie."""

import argparse

from .common import exclusive, main
from .debian import ensure_packages
from .tools import TOOL_SETS, ensure_tools, tool_path


def program() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.toolchain", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("install", help="install and build what is missing (the default)")
    path = commands.add_parser("path", help="print the path of each named tool, one a line")
    path.add_argument("names", nargs="+", metavar="NAME")
    packages = commands.add_parser("packages", help="install the named Debian packages alone")
    packages.add_argument("names", nargs="+", metavar="NAME")
    options = parser.parse_args()
    if options.command == "packages":
        with exclusive("toolchain"):
            ensure_packages(options.names)
        return
    if options.command == "path":
        for name in options.names:
            print(tool_path(name))
        return
    install()
    for tools in TOOL_SETS:
        print(f"{tools.name} {tools.version} in {tools.folder}")


def install() -> None:
    """Make the machine ready for a cluster; what is there already costs nothing."""
    with exclusive("toolchain"):
        ensure_packages()
    ensure_tools()


if __name__ == "__main__":
    main(program)
