# SPDX-License-Identifier: Apache-2.0
"""What the worker's tests said on each release of vLLM, kept in ``runs.json`` for the table of releases in the docs."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from pathlib import Path
from xml.etree import ElementTree

from hack.toolchain.common import UserError

RUNS = Path(__file__).with_name("runs.json")


@dataclass(frozen=True)
class Run:
    """A run in which no test failed, of a release as ``X.Y``."""

    release: str
    device: str
    date: str
    passed: int
    #: How many tests were skipped, by the reason that they gave.
    skipped: Mapping[str, int]


def read_runs(path: Path = RUNS) -> list[Run]:
    """Return the newest run of each release on each device, the oldest release first."""
    return [Run(**fields) for fields in json.loads(path.read_text())]


def record_run(reports: Sequence[Path], release: str, device: str, path: Path = RUNS) -> Run:
    """Keep what pytest wrote by ``--junitxml``, in place of an earlier run. UserError if a test failed, or none ran.

    Several ``reports`` are of tests that ran beside each other, each in one of them.
    """
    run = _sum([_read_report(report, release, device) for report in reports])
    others = [kept for kept in read_runs(path) if (kept.release, kept.device) != (release, device)]
    runs = sorted([*others, run], key=lambda kept: ([int(part) for part in kept.release.split(".")], kept.device))
    path.write_text(json.dumps([asdict(kept) for kept in runs], indent=2) + "\n")
    return run


def _sum(runs: Sequence[Run]) -> Run:
    skipped = sum((Counter(run.skipped) for run in runs), Counter())
    passed, newest = sum(run.passed for run in runs), max(run.date for run in runs)
    return replace(runs[0], date=newest, passed=passed, skipped=dict(sorted(skipped.items())))


def _read_report(report: Path, release: str, device: str) -> Run:
    suite = ElementTree.parse(report).getroot().find("testsuite")  # noqa: S314 - pytest's own
    if suite is None:
        raise UserError(f"{report} is no report of pytest: write one with --junitxml.")
    cases = suite.findall("testcase")
    failed = [
        case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skips = Counter(skip.get("message") or "known to fail" for case in cases for skip in case.findall("skipped"))
    passed = len(cases) - len(failed) - skips.total()
    if failed or not passed:
        raise UserError(f"{report}: {len(failed)} tests failed and {passed} passed: only a good run is kept.")
    begun = datetime.fromisoformat(suite.attrib["timestamp"])
    return Run(release, device, date.isoformat(begun), passed, dict(sorted(skips.items())))
