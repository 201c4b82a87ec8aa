# SPDX-License-Identifier: Apache-2.0
"""What is kept of the worker's tests on each release of vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest

from hack.generate import releases
from hack.toolchain.common import UserError
from hack.vllm.runs import read_runs, record_run

TESTS = """
import pytest

def test_one(): pass

@pytest.mark.parametrize("n", range(3))
def test_skipped(n): pytest.skip("needs a GPU")

@pytest.mark.xfail
def test_not_yet(): assert False
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.json"
    path.write_text("[]")
    return path


def report_of(folder: Path, tests: str) -> Path:
    """Run these tests; return pytest's report."""
    file, report = folder / "test_some.py", folder / "report.xml"
    file.write_text(tests)
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--junitxml",
        report,
        file,
    ]
    subprocess.run(argv, cwd=folder, capture_output=True, check=False)
    return report


def test_a_run_is_counted_and_takes_the_place_of_the_one_before(runs: Path, tmp_path: Path) -> None:
    report = report_of(tmp_path, TESTS)
    record_run([report], "0.32", "CPU", runs)
    record_run([report], "0.9", "CPU", runs)
    run = record_run([report], "0.32", "CPU", runs)
    assert (run.passed, run.skipped) == (1, {"known to fail": 1, "needs a GPU": 3})
    assert [kept.release for kept in read_runs(runs)] == ["0.9", "0.32"]
    page = releases.render(read_runs(runs), ["0.9", "0.31", "0.32"])
    assert f"| 0.32 | CPU | 1 | 4 | {run.date} |\n" in page
    assert "| 0.32 | CPU | 3 | needs a GPU |\n" in page
    assert "have not passed yet with 0.31.\n" in page
    assert "not passed yet" not in releases.render(read_runs(runs), ["0.9", "0.32"])


def test_tests_that_ran_beside_each_other_are_one_run(runs: Path, tmp_path: Path) -> None:
    report = report_of(tmp_path, TESTS)
    run = record_run([report, report], "0.32", "2 x H200", runs)
    assert (run.passed, run.skipped) == (2, {"known to fail": 2, "needs a GPU": 6})
    with pytest.raises(UserError, match="only a good run is kept"):
        record_run([report, report_of(tmp_path, "")], "0.32", "2 x H200", runs)


@pytest.mark.parametrize(
    "tests",
    [TESTS + "\ndef test_bad(): assert False", TESTS + "\n@pytest.fixture(autouse=True)\ndef bad(): 1 / 0", ""],
    ids=["failed", "error", "none"],
)
def test_a_run_that_shows_nothing_is_not_kept(tests: str, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only a good run is kept"):
        record_run([report_of(tmp_path, tests)], "0.32", "CPU", runs)
    assert read_runs(runs) == []
