# SPDX-License-Identifier: Apache-2.0
"""python3 -m hack.cluster.base_image: the Debian image that vLLM for CPU runs in, made by debootstrap and cached."""

import hashlib
import shutil
import tempfile
from pathlib import Path

from hack.toolchain.common import UserError, cache, exclusive, main, require_root, run
from hack.toolchain.debian import ensure_packages
from hack.toolchain.steps import step

from .buildah import buildah, has_image

SUITE = "bookworm"
# gcc and g++: vLLM compiles kernels while it runs. libgomp1 and libnuma1: its CPU build is linked with them.
PACKAGES = (
    "ca-certificates",
    "g++",
    "gcc",
    "libc6-dev",
    "libgomp1",
    "libnuma1",
    "python3",
    "python3-dev",
    "python3-pip",
    "python3-venv",
)
DEBOOTSTRAP_LIMIT = 900.0
# Package lists and archives are of no use in an image.
LEFTOVERS = ("var/cache/apt/archives", "var/lib/apt/lists")


def base_image_name() -> str:
    """The image's name; another package list gives another name."""
    content = hashlib.sha256(" ".join((SUITE, *PACKAGES)).encode()).hexdigest()
    return f"localhost/debian-base:{SUITE}-{content[:12]}"


def ensure_base_image() -> str:
    """Make the image unless it is in our buildah storage; returns its name."""
    require_root("debootstrap")
    with exclusive("base-image"):
        ensure_packages()
        if not has_image(base_image_name()):
            with step(f"image {base_image_name()}", of="Debian base image"):
                _make()
    return base_image_name()


def _make() -> None:
    with tempfile.TemporaryDirectory(dir=cache(), prefix=".debian-") as scratch:
        root = Path(scratch) / "root"
        packages = ",".join(PACKAGES)
        options = ("--variant=minbase", f"--include={packages}")
        run(["debootstrap", *options, SUITE, root, debian_mirror()], limit=DEBOOTSTRAP_LIMIT)
        for name in LEFTOVERS:
            shutil.rmtree(root / name)
            (root / name).mkdir()
        dockerfile = Path(scratch) / "Dockerfile"
        dockerfile.write_text('FROM scratch\nCOPY . /\nENV LANG=C.UTF-8\nCMD ["/bin/bash"]\n')
        buildah("build", "--tag", base_image_name(), "--file", dockerfile, root)


def debian_mirror() -> str:
    """The Debian mirror that this machine's apt uses itself."""
    listing = ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(SITE)", "Created-By: Packages"]
    for line in run(listing, limit=30).splitlines():
        suite, component, site = line.split()
        if (suite, component) == (SUITE, "main"):
            return site
    raise UserError(f"apt knows no mirror of {SUITE}: add one to /etc/apt/sources.list and run apt-get update.")


if __name__ == "__main__":
    main(lambda: print(ensure_base_image()))
