# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.prepare: build and download all that a cluster needs, and start nothing.

Builds want a CPU and downloads wait for a network, so both go on at a time.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

from hack.images.build import build
from hack.images.site import Role
from hack.models.store import models
from hack.toolchain.common import exclusive, main
from hack.toolchain.debian import ensure_packages
from hack.toolchain.tools import ensure_tools


def prepare() -> None:
    """Make ready what `hack.deploy.releases.deploy_locally` makes before it starts a cluster."""
    with exclusive("toolchain"):
        ensure_packages()
    with ThreadPoolExecutor() as pool:
        begun = [pool.submit(work) for work in (ensure_tools, models, _build_images)]
        for work in begun:
            work.result()


def _build_images() -> None:
    for role in Role:
        build(role)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python3 -m hack.prepare", description=__doc__).parse_args()
    main(prepare, resumes=True)
