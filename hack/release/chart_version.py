# SPDX-License-Identifier: Apache-2.0
"""A chart that has changed since the last release has a higher version, as `ct lint` of chart-testing demands."""

import os
import re
from pathlib import Path

import yaml

from hack.toolchain.common import UserError, run

#: Tags of releases: v, and a version.
_TAGS = "v[0-9]*"
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?")
GIT_SECONDS = 30

#: The three numbers; whether it is no pre-release; and the parts of a pre-release, numbers before words.
Order = tuple[tuple[int, int, int], bool, tuple[tuple[int, int, str], ...]]


def check_increment(repository: Path, chart: str) -> str | None:
    """Compare a chart, a folder below ``repository``, with the last release; return its tag, None without a release.

    UserError if files of the chart differ, committed or not, and its version is not higher; and if git fails.
    """
    tag = _last_release(repository)
    if tag is None or not _changed_files(repository, tag, chart):
        return tag
    if not git(repository, "ls-tree", tag, "--", f"{chart}/Chart.yaml"):
        return tag  # a new chart
    old, new = (
        _version(git(repository, "show", f"{tag}:{chart}/Chart.yaml")),
        _version((repository / chart / "Chart.yaml").read_text()),
    )
    if order(new) <= order(old):
        raise UserError(
            f"{chart} has changed since {tag} and still has version {new}: raise it above {old}, with pyproject.toml's."
        )
    return tag


def order(version: str) -> Order:
    """Return what semantic versions are compared by. UserError if it is none, with three numbers."""
    found = _VERSION.fullmatch(version)
    if found is None:
        raise UserError(f"{version!r} is no semantic version: write it like 1.2.3 or 1.2.3-rc.1.")
    parts = (found[4] or "").split(".") if found[4] else []
    words = tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)
    return (int(found[1]), int(found[2]), int(found[3])), not parts, words


def git(repository: Path, *arguments: str) -> str:
    """Run git in a repository and return what it prints. UserError if it fails."""
    # Hooks get variables that name their own repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return run(["git", *arguments], limit=GIT_SECONDS, cwd=repository, env=environment)


def _version(text: str) -> str:
    return str(yaml.safe_load(text)["version"])


def _last_release(repository: Path) -> str | None:
    # Without the suffix a pre-release would come after its release.
    listing = ("-c", "versionsort.suffix=-", "tag", "--list", _TAGS, "--merged", "HEAD", "--sort=-version:refname")
    return next(iter(git(repository, *listing).split()), None)


def _changed_files(repository: Path, tag: str, chart: str) -> list[str]:
    tracked = git(repository, "diff", "--name-only", tag, "--", chart)
    untracked = git(repository, "ls-files", "--others", "--exclude-standard", "--", chart)
    return [*tracked.split(), *untracked.split()]
