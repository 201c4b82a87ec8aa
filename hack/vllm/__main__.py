# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.vllm: build a worker environment (vLLM on CPU).

With "path": also print its folder. With "lock": write its lock file anew. With "versions": print the supported ones.
With "record": keep what a ``--report`` of pytest says of that release, for `make generate`, which writes the table.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from hack.toolchain.common import main
from hack.vllm.environment import NEWEST, VERSIONS, environment, write_lock
from hack.vllm.runs import record_run


def program() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.vllm", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["path", "lock", "versions", "record"])
    parser.add_argument("--version", choices=VERSIONS, default=NEWEST, help="minor release of vLLM (%(default)s)")
    parser.add_argument("--report", type=Path, nargs="+", help="files that pytest wrote by --junitxml")
    parser.add_argument("--device", default="CPU", help="what the tests ran on (%(default)s)")
    arguments = parser.parse_args()
    if arguments.what == "versions":
        print(*VERSIONS)
    elif arguments.what == "lock":
        write_lock(arguments.version)
    elif arguments.what == "record":
        if arguments.report is None:
            parser.error("record wants the --report of a run")
        record_run(arguments.report, arguments.version, arguments.device)
    else:
        _build(arguments.version, print_path=arguments.what == "path")


def _build(version: str, *, print_path: bool) -> None:
    # Progress must not end up in $(python3 -m hack.vllm path).
    with contextlib.redirect_stdout(sys.stderr):
        folder = environment(version)
    if print_path:
        print(folder)


if __name__ == "__main__":
    main(program)
