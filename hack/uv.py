# SPDX-License-Identifier: Apache-2.0
"""The pinned uv, which resolves and installs everything that is Python.

``python3 -m hack.uv path`` prints where it lies.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from hack.toolchain.common import cache, exclusive, main, run

VERSION = "0.13.8"
INSTALL_SECONDS = 300


def uv_path() -> Path:
    """Return the pinned uv's program file, installing it first where it is missing."""
    folder = cache() / "uv" / VERSION
    program = folder / "bin" / "uv"
    with exclusive("uv"):
        if not program.exists():
            run([sys.executable, "-m", "venv", folder], limit=INSTALL_SECONDS)
            run([folder / "bin" / "pip", "install", "--quiet", f"uv=={VERSION}"], limit=INSTALL_SECONDS)
    return program


def uv_environment() -> dict[str, str]:
    """Return the environment in which uv keeps its downloads under the home folder."""
    return {**os.environ, "UV_CACHE_DIR": str(cache() / "uv-cache")}


def program() -> None:
    """Print where uv lies."""
    parser = argparse.ArgumentParser(prog="python3 -m hack.uv", description=__doc__)
    parser.add_argument("what", choices=["path"])
    parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        path = uv_path()
    print(path)


if __name__ == "__main__":
    main(program)
