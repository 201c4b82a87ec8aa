# SPDX-License-Identifier: Apache-2.0
"""The releases that are accepted are those that the tests can run on."""

import pytest

from hack.vllm.environment import ROOT, VERSIONS
from hack.vllm.runs import read_runs
from vllm_poc.start_checks import RELEASES


def test_the_oldest_and_the_newest_accepted_release_have_an_environment() -> None:
    accepted = tuple(".".join(map(str, minor)) for minor in RELEASES)
    assert (VERSIONS[0], VERSIONS[-1]) == accepted


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lock_has_the_release_that_its_name_says(version: str) -> None:
    assert f"\nvllm-cpu=={version}." in (ROOT / "locks" / f"worker-cpu-{version}.txt").read_text()


def test_the_table_of_releases_has_a_run_of_each() -> None:
    assert {run.release for run in read_runs() if run.device == "CPU"} >= set(VERSIONS)
