# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.cluster: a local one-node cluster for development and tests."""

import argparse

from hack.toolchain.common import UserError, exclusive, main
from hack.toolchain.steps import step

from .images import load
from .layout import admin_kubeconfig, log, state
from .parts import Part, parts
from .processes import running
from .teardown import down
from .up import up


def program() -> None:
    """Do what the command line says."""
    options = _parser().parse_args()
    if options.command == "kubeconfig":
        print(_kubeconfig())
    elif options.command == "status":
        _status()
    else:
        with exclusive("cluster"):
            _change(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m hack.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("up", help="start what does not run yet; ends when pods can be made")
    commands.add_parser("down", help="remove the cluster; built tools and images stay in the cache")
    commands.add_parser("status", help="tell of every part whether it runs and is healthy")
    commands.add_parser("kubeconfig", help="print the path of the administrator's kubeconfig")
    loading = commands.add_parser("load", help="bring an image into the cluster")
    loading.add_argument("source", help="an OCI archive, or the name of an image of our buildah storage")
    loading.add_argument("--name", help="the name for pods to use, if not the image's own")
    return parser


def _change(options: argparse.Namespace) -> None:
    if options.command == "up":
        with step("up"):
            up()
        print(f"export KUBECONFIG={admin_kubeconfig()}")
    elif options.command == "down":
        with step("down"):
            down()
    else:
        with step(f"load {options.source}", of="load"):
            name = load(options.source, options.name)
        print(name)


def _kubeconfig() -> str:
    if not admin_kubeconfig().exists():
        raise UserError("There is no cluster: run python3 -m hack.cluster up.")
    return str(admin_kubeconfig())


def _status() -> None:
    if not state().exists():
        raise UserError("There is no cluster: run python3 -m hack.cluster up.")
    table = {part.name: _state(part) for part in parts()}
    for name, word in table.items():
        print(f"{name:24} {word}")
    ill = [name for name, word in table.items() if word != "healthy"]
    if ill:
        raise UserError(f"{', '.join(ill)} not healthy (see {log(ill[0])}): run python3 -m hack.cluster up.")


def _state(part: Part) -> str:
    if not running(part.name):
        return "not running"
    return "healthy" if part.check.healthy() else "running, not healthy"


if __name__ == "__main__":
    main(program)
