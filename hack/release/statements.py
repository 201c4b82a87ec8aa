# SPDX-License-Identifier: Apache-2.0
"""What a release says about itself: its parts (SBOM), their licences, how it was built, and the sums of all files."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hack.cluster.base_image import SUITE
from hack.images.site import ROOT, Role, site
from hack.release.debian import LOCK
from hack.release.environment import tool
from hack.toolchain.common import UserError, run

SUMS = "SHA256SUMS"
PROVENANCE = "provenance.intoto.json"
LICENSES = "licenses.md"
BUILD_TYPE = "https://poc.gonka.ai/release-artifacts/v1"
#: What a package says of its licence is text of its own; one that has none of these words needs a person's eye.
PERMITTED = re.compile(r"\b(?:Apache|BSD|MIT\b|ISC|MPL|Mozilla|PSF|Python|LGPL|Unlicense|Zlib|0BSD)", re.IGNORECASE)


def write_sbom(role: Role, path: Path, epoch: int) -> None:
    """Write what is in the role's image as CycloneDX 1.6: Python packages, and Debian's of each architecture.

    The file's time and serial number do not vary.
    """
    if role.lock is None:
        raise UserError(f"The {role} has no lock file of its own: its base image brings what it needs.")
    argv: list[str | Path] = [tool("cyclonedx-py"), "requirements", role.lock, "--output-reproducible", "--of", "JSON"]
    argv += ["--spec-version", "1.6", "--pyproject", ROOT / "pyproject.toml", "--mc-type", "application"]
    content = json.loads(run(argv, limit=120))
    content["metadata"]["timestamp"] = _time(epoch)
    content["components"] = [*content.get("components", []), *debian_components()]
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def debian_components() -> list[dict[str, Any]]:
    """Return the pinned Debian packages of the images' base as components of an SBOM, by their package URLs."""
    found = []
    for architecture, packages in json.loads(LOCK.read_text()).items():
        for package in packages:
            version = quote(package["version"], safe="")
            purl = f"pkg:deb/debian/{package['name']}@{version}?arch={architecture}&distro={SUITE}"
            found.append(
                {
                    "type": "library",
                    "bom-ref": purl,
                    "name": package["name"],
                    "version": package["version"],
                    "purl": purl,
                    "hashes": [{"alg": "SHA-256", "content": package["sha256"]}],
                }
            )
    return found


def write_licenses(roles: Iterable[Role], path: Path) -> None:
    """Write the licence of each package in the images. UserError for one whose licence is missing or unknown."""
    packages = {name: licence for role in roles for name, licence in _licenses(site(role))}
    unknown = sorted(name for name, licence in packages.items() if not PERMITTED.search(licence))
    if unknown:
        raise UserError(f"The licence of {', '.join(unknown)} is not among the permitted ones: look, then add it.")
    rows = [f"| {name} | {licence} |" for name, licence in sorted(packages.items())]
    path.write_text("\n".join(["| Package | License |", "| --- | --- |", *rows]) + "\n")


def license_of(metadata: Mapping[str, str], classifiers: Iterable[str]) -> str:
    """Return what a package's metadata says, the SPDX expression before anything else; empty if it says nothing."""
    named = [one.rsplit(" :: ", 1)[1] for one in classifiers if one.startswith("License :: ")]
    first_line = (metadata.get("License") or "").strip().split("\n")[0]
    return metadata.get("License-Expression") or ", ".join(named) or first_line


def write_provenance(folder: Path, *, version: str, images: Mapping[str, str], epoch: int) -> None:
    """Write an in-toto statement with the SLSA provenance of every file; unsigned."""
    subjects = [{"name": path.name, "digest": {"sha256": _sum(path)}} for path in _files(folder)]
    manifests = [{"name": name, "digest": {"sha256": digest.split(":")[1]}} for name, digest in sorted(images.items())]
    pins = [*sorted((ROOT / "locks").glob("*.txt")), LOCK]
    materials = [{"name": str(path.relative_to(ROOT)), "digest": {"sha256": _sum(path)}} for path in pins]
    source = {"name": "source", "digest": {"gitCommit": commit()}}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [*subjects, *manifests],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"target": "release-artifacts", "version": version, "changed": _is_changed()},
                "resolvedDependencies": [source, *materials],
            },
            "runDetails": {
                "builder": {"id": f"{BUILD_TYPE}/make"},
                # The time of the sources: a clock would make each build differ.
                "metadata": {"startedOn": _time(epoch)},
            },
        },
    }
    (folder / PROVENANCE).write_text(json.dumps(statement, indent=1, sort_keys=True) + "\n")


def write_sums(folder: Path) -> None:
    """Write the sums of all files, as sha256sum --check reads them."""
    lines = [f"{_sum(path)}  {path.name}" for path in _files(folder)]
    (folder / SUMS).write_text("\n".join(lines) + "\n")


def commit() -> str:
    """Return the commit that is checked out."""
    return run(["git", "rev-parse", "HEAD"], limit=10, cwd=ROOT).strip()


def _is_changed() -> bool:
    """Tell whether the files built are not those of the commit."""
    return bool(run(["git", "status", "--porcelain"], limit=10, cwd=ROOT).strip())


def commit_time() -> int:
    """Return when the commit was made, in seconds of Unix time."""
    return int(run(["git", "log", "-1", "--format=%ct"], limit=10, cwd=ROOT))


def _licenses(folder: Path) -> Iterable[tuple[str, str]]:
    for path in sorted(folder.glob("*.dist-info/METADATA")):
        metadata = HeaderParser().parsestr(path.read_text())
        licence = license_of(dict(metadata.items()), metadata.get_all("Classifier", []))
        yield f"{metadata['Name']} {metadata['Version']}", licence


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != SUMS)


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _time(epoch: int) -> str:
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
