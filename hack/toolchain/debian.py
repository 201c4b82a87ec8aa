# SPDX-License-Identifier: Apache-2.0
"""The Debian packages that the cluster, the image builds and the tests need: which, in which versions."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from .common import UserError, require_root, run
from .steps import step

# Package name -> the version prefix this project is tested with ("" accepts every version).
PACKAGES = {
    "buildah": "1.28.",
    "busybox-static": "",
    "ca-certificates": "",
    "conntrack": "",
    "containerd": "1.6.",
    "containernetworking-plugins": "1.1.",
    "debootstrap": "",
    "iproute2": "",
    "iptables": "1.8.",
    "kmod": "",
    "mount": "",
    "openssl": "3.0.",
    "python3-venv": "3.11.",
    "runc": "1.1.",
}

# What only tests need, so that a demo brings neither a database server nor a browser along.
TEST_PACKAGES = {"chromium": "", "postgresql": "15+"}
_PREFIXES = PACKAGES | TEST_PACKAGES


def ensure_packages(names: Collection[str] = tuple(PACKAGES)) -> None:
    """Install what is missing of ``names``, and check the versions of what is there."""
    unknown = sorted(set(names) - set(_PREFIXES))
    if unknown:
        raise UserError(f"No such package is needed: {' '.join(unknown)}. There are: {' '.join(_PREFIXES)}.")
    _require_debian()
    missing = sorted(set(names) - set(_installed()))
    if missing:
        require_root("Installing Debian packages")
        with step(f"Debian packages {' '.join(missing)}", of="Debian packages"):
            _install(missing)
    installed = _installed()
    _check_versions({name: installed[name] for name in names})


def _require_debian() -> None:
    release = Path("/etc/os-release").read_text()
    if not re.search(r'^VERSION_CODENAME="?bookworm', release, re.MULTILINE):
        raise UserError("This machine is not Debian 12 (bookworm): run hack/ on a Debian 12 machine.")


def _installed() -> dict[str, str]:
    """The installed packages of the table, with their versions."""
    # The pattern form "*" is used because dpkg-query fails as a whole when one exact name is unknown to it.
    listing = run(["dpkg-query", "-W", "-f", "${Package}\t${db:Status-Status}\t${Version}\n", "*"], limit=30)
    rows = (line.split("\t") for line in listing.splitlines())
    return {name: version for name, status, version in rows if name in _PREFIXES and status == "installed"}


def _install(names: list[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update"], limit=300, env=environment)
    run(["apt-get", "install", "--yes", "--no-install-recommends", *names], limit=900, env=environment)


def _check_versions(installed: dict[str, str]) -> None:
    for name, full in installed.items():
        prefix, version = _PREFIXES[name], full.split(":")[-1]  # without the epoch
        if not version.startswith(prefix):
            raise UserError(
                f"The Debian package {name} has version {version}, but {prefix}x is needed: "
                f"install Debian 12's own with apt-get install {name}/bookworm."
            )
