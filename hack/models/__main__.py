# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.models: write the tiny models. With "path": also print their folder."""

import argparse
import contextlib
import sys

from hack.models.store import models
from hack.toolchain.common import main


def program() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.models", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["path"])
    what = parser.parse_args().what
    # Progress must not end up in $(python3 -m hack.models path).
    with contextlib.redirect_stdout(sys.stderr):
        folder = models()
    if what == "path":
        print(folder)


if __name__ == "__main__":
    main(program)
