# SPDX-License-Identifier: Apache-2.0
"""Bringing images into the cluster's containerd, from an OCI archive or from our buildah storage."""

import json
import shutil
import tarfile
import tempfile
from pathlib import Path

from hack.toolchain.common import UserError, home, run

from .buildah import buildah, export_image, has_image
from .layout import CONTAINERD_NAMESPACE, PAUSE_IMAGE, containerd_socket

IMPORT_LIMIT = 600.0
NAME_ANNOTATION = "org.opencontainers.image.ref.name"
STATIC_BUSYBOX = Path("/bin/busybox")
PAUSE_BUILD = """FROM scratch
COPY busybox /bin/busybox
ENTRYPOINT ["/bin/busybox", "sleep", "2147483647"]
"""


def ctr(*arguments: str | Path, limit: float = 60.0) -> str:
    """Run a ctr command on the cluster's containerd."""
    return run(["ctr", "--address", containerd_socket(), "--namespace", CONTAINERD_NAMESPACE, *arguments], limit=limit)


def load(source: str, name: str | None = None) -> str:
    """Import an archive or an image of our buildah storage; returns the name that pods use."""
    if Path(source).is_file():
        return _load_archive(Path(source), name)
    if not has_image(source):
        raise UserError(f"{source} is neither a file nor an image in buildah: build it with hack.cluster.buildah.")
    with tempfile.TemporaryDirectory(dir=home()) as scratch:
        archive = Path(scratch) / "image.tar"
        export_image(source, archive)
        return _load_archive(archive, name or source)


def is_loaded(name: str) -> bool:
    """Whether the cluster has an image of that name."""
    return name in ctr("images", "list", "--quiet").split()


def ensure_pause_image() -> None:
    """The image of the process that holds a pod's namespaces: it sleeps."""
    if is_loaded(PAUSE_IMAGE):
        return
    with tempfile.TemporaryDirectory(dir=home()) as scratch:
        shutil.copy(STATIC_BUSYBOX, Path(scratch) / "busybox")
        (Path(scratch) / "Dockerfile").write_text(PAUSE_BUILD)
        buildah("build", "--tag", PAUSE_IMAGE, scratch)
    load(PAUSE_IMAGE)


def _load_archive(archive: Path, name: str | None) -> str:
    own = _archive_name(archive)
    # The archive's own name; importing its index under a second name would let containerd drop the index at once.
    ctr("images", "import", archive, limit=IMPORT_LIMIT)
    if name and name != own:
        ctr("images", "tag", "--force", own, name)
    return name or own


def _archive_name(archive: Path) -> str:
    """The name an archive gives to its image."""
    try:
        with tarfile.open(archive) as content:
            index = content.extractfile("index.json")
            manifests = json.load(index)["manifests"] if index else []
    except (tarfile.TarError, KeyError, ValueError):
        raise UserError(f"{archive} is no OCI archive: make one with buildah push IMAGE oci-archive:FILE.") from None
    names = [manifest.get("annotations", {}).get(NAME_ANNOTATION, "") for manifest in manifests]
    if len(names) != 1 or ":" not in names[0]:
        raise UserError(
            f"{archive} does not name its image in full: make it with buildah push IMAGE oci-archive:FILE:IMAGE."
        )
    return str(names[0])
