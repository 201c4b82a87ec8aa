# SPDX-License-Identifier: Apache-2.0
"""Building images with buildah, in a storage of our own, without a daemon and without a registry."""

import json
import os
import sys
from pathlib import Path

from hack.toolchain.common import UserError, cache, main, require_root, run

LIMIT = 1800.0
# The commands that read images, and so ask for a signature policy.
POLICY_COMMANDS = ("build", "from", "pull", "push")
ACCEPT_ALL = {"default": [{"type": "insecureAcceptAnything"}]}


def buildah(command: str, *arguments: str | Path, limit: float = LIMIT) -> str:
    """Run one buildah command in our storage and return its standard output."""
    require_root("buildah")
    storage = cache() / "buildah"
    storage.mkdir(parents=True, exist_ok=True)
    argv: list[str | Path] = ["buildah", "--root", storage / "root", "--runroot", storage / "run"]
    argv += ["--storage-driver", "overlay", command]
    if command in POLICY_COMMANDS:
        argv += ["--signature-policy", _policy(storage)]
    # chroot isolation: no container runtime and no rights beyond root's are needed to run a build's commands.
    return run([*argv, *arguments], limit=limit, env={**os.environ, "BUILDAH_ISOLATION": "chroot"})


def has_image(name: str) -> bool:
    """Whether our storage has an image of that full name."""
    images = json.loads(buildah("images", "--json", limit=60))
    return any(name in (image.get("names") or []) for image in images)


def export_image(name: str, archive: Path) -> None:
    """Write an image as an OCI archive; uncompressed, because it is read on this machine and nowhere else."""
    buildah("push", "--disable-compression", name, f"oci-archive:{archive}:{name}")


def _policy(storage: Path) -> Path:
    path = storage / "policy.json"
    path.write_text(json.dumps(ACCEPT_ALL))
    return path


def program() -> None:
    """Pass the command line on to buildah."""
    if len(sys.argv) == 1:
        raise UserError("No buildah command is given: name one, for example images.")
    print(buildah(*sys.argv[1:]), end="")


if __name__ == "__main__":
    main(program)
