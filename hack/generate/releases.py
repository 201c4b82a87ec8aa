# SPDX-License-Identifier: Apache-2.0
"""The page of vLLM's releases, from the runs of the worker's tests."""

from collections.abc import Sequence

from hack.vllm.runs import Run

_NOTE = "<!-- Written by `make generate` from hack/vllm/runs.json: do not edit. -->"
_HEAD = f"""{_NOTE}
# Releases of vLLM

The tests of the worker, on real vLLM servers, last passed with these releases. `make test-versions` runs them on a CPU
and keeps what they said. On GPUs they are those of `tests/gpu`.

| vLLM | device | passed | skipped | on |
| --- | --- | --- | --- | --- |
"""
_SKIPS = """
A test is skipped where the release or the device has not what it needs:

| vLLM | device | tests | reason |
| --- | --- | --- | --- |
"""


def render(runs: Sequence[Run], versions: Sequence[str]) -> str:
    """Return the page in Markdown. Of ``versions``, those without a run are named."""
    rows = [
        f"| {run.release} | {run.device} | {run.passed} | {sum(run.skipped.values())} | {run.date} |\n" for run in runs
    ]
    skips = [
        f"| {run.release} | {run.device} | {tests} | {reason} |\n"
        for run in runs
        for reason, tests in run.skipped.items()
    ]
    open_ones = [version for version in versions if version not in {run.release for run in runs}]
    missing = f"\nThe tests have not passed yet with {', '.join(open_ones)}.\n" if open_ones else ""
    return "".join([_HEAD, *rows, missing, *([_SKIPS, *skips] if skips else [])])
