# SPDX-License-Identifier: Apache-2.0
"""OCI archives: layers of files whose bytes depend on nothing but the files and the release's time."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
CHART_CONFIG = "application/vnd.cncf.helm.config.v1+json"
CHART = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file of a layer; a link's content is where it points to."""

    kind: Literal["file", "folder", "link"] = "file"
    content: bytes = b""
    mode: int = 0o644


#: Path without a leading slash -> what is there.
Tree = dict[str, Entry]


@dataclass(frozen=True)
class Blob:
    """Content with its digest, as manifests name it."""

    media_type: str
    content: bytes
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The digest, with the name of its algorithm."""
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"

    @property
    def descriptor(self) -> dict[str, object]:
        """How a manifest or an index names it."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.content), **self.extra}


def tar(tree: Tree, epoch: int) -> bytes:
    """Return the tree as an archive in which every file belongs to root and has the time ``epoch`` (seconds)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, entry in sorted(tree.items()):
            member = tarfile.TarInfo(path)
            member.mtime, member.mode = epoch, entry.mode
            if entry.kind == "file":
                member.size = len(entry.content)
            elif entry.kind == "folder":
                member.type = tarfile.DIRTYPE
            else:
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, entry.content.decode(), 0o777
            archive.addfile(member, io.BytesIO(entry.content) if entry.kind == "file" else None)
    return stream.getvalue()


def compress(content: bytes) -> bytes:
    """Compress with gzip, without a time in the header."""
    return gzip.compress(content, compresslevel=6, mtime=0)


def image(layers: Sequence[Tree], *, architecture: str, config: Mapping[str, object], epoch: int) -> list[Blob]:
    """Return the blobs of an image for one architecture, its manifest last."""
    archives = [tar(layer, epoch) for layer in layers]
    created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    content = {
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in archives]},
    }
    blobs = [Blob(CONFIG, _json(content)), *(Blob(LAYER, compress(one)) for one in archives)]
    platform = {"platform": {"architecture": architecture, "os": "linux"}}
    return [*blobs, _manifest(blobs, platform)]


def chart(archive: bytes, metadata: Mapping[str, object]) -> list[Blob]:
    """Return the blobs of a Helm chart, its manifest last."""
    blobs = [Blob(CHART_CONFIG, _json(metadata)), Blob(CHART, archive)]
    return [*blobs, _manifest(blobs, {})]


def write_archive(path: Path, artifacts: Sequence[Sequence[Blob]], *, tag: str, epoch: int) -> str:
    """Write an OCI archive in which ``tag`` names the artifact, or an index of several; return its digest."""
    top = artifacts[0][-1]
    blobs = [blob for artifact in artifacts for blob in artifact]
    if len(artifacts) > 1:
        manifests = [artifact[-1].descriptor for artifact in artifacts]
        top = Blob(INDEX, _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}))
        blobs.append(top)
    named = {**top.descriptor, "annotations": {"org.opencontainers.image.ref.name": tag}}
    tree = {
        "oci-layout": Entry(content=_json({"imageLayoutVersion": "1.0.0"})),
        "index.json": Entry(content=_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]})),
        **{f"blobs/{blob.digest.replace(':', '/')}": Entry(content=blob.content) for blob in blobs},
    }
    path.write_bytes(tar(tree, epoch))
    return top.digest


def _manifest(blobs: Sequence[Blob], extra: Mapping[str, object]) -> Blob:
    config, *layers = blobs
    content = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.descriptor,
        "layers": [layer.descriptor for layer in layers],
    }
    return Blob(MANIFEST, _json(content), extra)


def _json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
