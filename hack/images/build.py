# SPDX-License-Identifier: Apache-2.0
"""Building the images with buildah. A tag is a hash of the content: what has not changed is not built again."""

import hashlib

from hack.cluster.base_image import ensure_base_image
from hack.cluster.buildah import buildah, has_image
from hack.images.site import ROOT, Role, fingerprint, site
from hack.toolchain.common import exclusive
from hack.toolchain.steps import step

DOCKERFILES = {
    Role.OPERATOR: ROOT / "image" / "operator.Dockerfile",
    Role.GATEWAY: ROOT / "image" / "gateway.Dockerfile",
    Role.WORKER: ROOT / "image" / "Dockerfile",
}
REPOSITORIES = {role: f"localhost/vllm-poc-{role}" for role in Role}


def image_name(role: Role, base: str) -> str:
    """Return the full name that the role's image has on this base."""
    content = f"{base} {fingerprint(role)}".encode() + DOCKERFILES[role].read_bytes()
    tag = hashlib.sha256(content).hexdigest()[:12]
    return f"{REPOSITORIES[role]}:{tag}"


def build(role: Role, base: str | None = None) -> str:
    """Build the role's image on ``base`` (default: the local Debian image); return its name."""
    base = base or ensure_base_image()
    name = image_name(role, base)
    folder = site(role)
    with exclusive("images"):
        if not has_image(name):
            with step(f"image {name}", of=f"image of the {role}"):
                settings = ["--tag", name, "--build-arg", f"BASE_IMAGE={base}"]
                buildah("build", *settings, "--file", DOCKERFILES[role], folder)
    return name
