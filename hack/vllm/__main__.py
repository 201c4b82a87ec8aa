# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.vllm: build the worker environment (vLLM on CPU).

With "path": also print its folder. With "lock": write the lock file anew.
"""

import argparse
import contextlib
import sys

from hack.toolchain.common import main
from hack.vllm.environment import environment, write_lock


def program() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.vllm", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["path", "lock"])
    what = parser.parse_args().what
    if what == "lock":
        write_lock()
        return
    # Progress must not end up in $(python3 -m hack.vllm path).
    with contextlib.redirect_stdout(sys.stderr):
        folder = environment()
    if what == "path":
        print(folder)


if __name__ == "__main__":
    main(program)
