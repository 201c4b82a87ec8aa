# SPDX-License-Identifier: Apache-2.0
"""The base of the images: pinned Debian packages, unpacked without their scripts, so that any machine makes any base.

``debian.json`` beside this file names each package with its version and its SHA-256; ``lock`` writes it anew.
"""

import hashlib
import http.client
import io
import json
import lzma
import tarfile
import tempfile
import urllib.request
from pathlib import Path

from hack.cluster.base_image import SUITE, debian_mirror
from hack.release.oci import Entry, Tree
from hack.toolchain.common import UserError, cache, run

LOCK = Path(__file__).with_name("debian.json")
ARCHITECTURES = ("amd64", "arm64")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
DOWNLOAD_LIMIT = 120.0
# Python 3.11 with what it loads; libstdc++6 for pyarrow; no shell and no package manager.
PACKAGES = [
    "base-files",
    "ca-certificates",
    "gcc-12-base",
    "libbz2-1.0",
    "libc6",
    "libcom-err2",
    "libcrypt1",
    "libdb5.3",
    "libexpat1",
    "libffi8",
    "libgcc-s1",
    "libgssapi-krb5-2",
    "libk5crypto3",
    "libkeyutils1",
    "libkrb5-3",
    "libkrb5support0",
    "liblzma5",
    "libncursesw6",
    "libnsl2",
    "libpython3-stdlib",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libreadline8",
    "libsqlite3-0",
    "libssl3",
    "libstdc++6",
    "libtinfo6",
    "libtirpc-common",
    "libtirpc3",
    "libuuid1",
    "media-types",
    "netbase",
    "python3",
    "python3-minimal",
    "python3.11",
    "python3.11-minimal",
    "tzdata",
    "zlib1g",
]
LEFT_OUT = ("usr/share/man/", "usr/share/locale/", "usr/share/lintian/", "usr/share/bug/", "var/")
ACCOUNTS = "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n"


def base_tree(architecture: str) -> Tree:
    """Return the files of the base image. UserError for a package that the mirror lacks or that is not as pinned."""
    tree: Tree = {}
    for package in json.loads(LOCK.read_text())[architecture]:
        _unpack(_package_file(package), tree)
    bundle = b"".join(
        entry.content for path, entry in sorted(tree.items()) if path.startswith("usr/share/ca-certificates/mozilla/")
    )
    tree["etc/ssl/certs/ca-certificates.crt"] = Entry(content=bundle)
    tree["etc/passwd"] = Entry(content=ACCOUNTS.encode())
    tree["etc/group"] = Entry(content=b"root:x:0:\nnonroot:x:65532:\n")
    tree["tmp"] = Entry(kind="folder", mode=0o1777)
    return tree


def lock() -> None:
    """Pin the newest version of each package that Debian has signed."""
    pins = {architecture: _newest(architecture) for architecture in ARCHITECTURES}
    LOCK.write_text(json.dumps(pins, indent=1) + "\n")


def _newest(architecture: str) -> list[dict[str, str]]:
    index = f"main/binary-{architecture}/Packages.xz"
    content = _download(f"dists/{SUITE}/{index}")
    signed = [line.split() for line in _signed_release().splitlines()]
    if [hashlib.sha256(content).hexdigest(), str(len(content)), index] not in signed:
        raise UserError(f"{index} is not the file that Debian has signed: the mirror changes now, try again later.")
    found = {}
    for paragraph in lzma.decompress(content).decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if line[:1] != " " and ": " in line)
        if fields.get("Package") in PACKAGES:
            names = {"name": "Package", "version": "Version", "path": "Filename", "sha256": "SHA256"}
            found[fields["Package"]] = {name: fields[field] for name, field in names.items()}
    missing = sorted(set(PACKAGES) - set(found))
    if missing:
        raise UserError(f"Debian {SUITE} has no package {', '.join(missing)}: mend PACKAGES in {__file__}.")
    return [found[name] for name in sorted(found)]


def _signed_release() -> str:
    with tempfile.NamedTemporaryFile() as signed:
        signed.write(_download(f"dists/{SUITE}/InRelease"))
        signed.flush()
        return run(["gpgv", "--keyring", KEYRING, "--output", "-", signed.name], limit=30)


def _package_file(package: dict[str, str]) -> Path:
    kept = cache() / "debian" / f"{package['sha256']}.deb"
    if not kept.exists():
        content = _download(package["path"])
        if hashlib.sha256(content).hexdigest() != package["sha256"]:
            raise UserError(f"{package['path']} is not the file that {LOCK.name} pins: use another Debian mirror.")
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(".part")
        unfinished.write_bytes(content)
        unfinished.rename(kept)
    return kept


def _download(path: str) -> bytes:
    url = f"{debian_mirror().rstrip('/')}/{path}"
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_LIMIT) as answer:  # noqa: S310 - apt's own mirror
            content: bytes = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{url} cannot be had ({error}): run make release-lock if the version is gone.") from None
    return content


def _unpack(package: Path, tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # The control part has the scripts; --fsys-tarfile would print bytes, which run() reads as text.
        run(["dpkg-deb", "--extract", package, scratch], limit=60)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            archive.add(scratch, arcname=".")
        stream.seek(0)
        with tarfile.open(fileobj=stream) as archive:
            for member in archive:
                path = member.name.removeprefix("./")
                if path != "." and not _is_left_out(path):
                    tree[path] = _entry(archive, member)


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    if member.isdir():
        return Entry(kind="folder", mode=member.mode)
    if member.issym():
        return Entry(kind="link", content=member.linkname.encode())
    content = archive.extractfile(member)  # follows hard links
    if content is None:
        raise UserError(f"{member.name} is no file, folder or link, which an image cannot have: leave its package out.")
    return Entry(content=content.read(), mode=member.mode)


def _is_left_out(path: str) -> bool:
    in_docs = path.startswith("usr/share/doc/") and not path.endswith("/copyright")
    return path.startswith(LEFT_OUT) or in_docs
