# SPDX-License-Identifier: Apache-2.0
"""How long a stage may take: what it took on this machine before, or a measured figure until there is one."""

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from .common import cache

#: Seconds until a stage has run here once. docs/benchmarks.md has the table and says on which machine.
MEASURED = {
    "kubernetes": 662.0,
    "helm": 322.0,
    "Debian base image": 230.0,
    "vLLM": 104.0,
    "etcd": 55.0,
    "packages of the gateway image": 30.0,
    "tiny models": 23.0,
    "packages of the operator image": 20.0,
}
#: Runs of a stage that are remembered: the longest counts, so that the time left is rarely said too short.
KEPT = 3
#: A shorter run had nothing to do, and tells nothing of the next one.
LEAST_SECONDS = 1.0

_lock = threading.Lock()


def estimate(stage: str) -> float | None:
    """Return the seconds that a stage takes at most, as far as anybody knows; None for an unknown one."""
    return max(_recorded().get(stage, []), default=MEASURED.get(stage))


def record(stage: str, seconds: float) -> None:
    """Remember how long a stage took. A cache that cannot be written costs estimates, and must not end a build."""
    if seconds < LEAST_SECONDS:
        return
    with _lock, suppress(OSError):
        found = _recorded()
        found[stage] = [*found.get(stage, []), round(seconds, 1)][-KEPT:]
        _path().parent.mkdir(parents=True, exist_ok=True)
        unfinished = _path().with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(found, indent=1, sort_keys=True))
        unfinished.rename(_path())


def _path() -> Path:
    return cache() / "durations.json"


def _recorded() -> dict[str, list[float]]:
    """Return the times of each stage; whatever else the file holds is as good as none."""
    try:
        found = json.loads(_path().read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return {stage: _times(value) for stage, value in found.items()} if isinstance(found, dict) else {}


def _times(value: Any) -> list[float]:  # noqa: ANN401 - JSON that anybody may have written
    numbers = value if isinstance(value, list) else []
    # JSON in Python has NaN and Infinity, and integers that are larger than any float.
    return [float(one) for one in numbers if type(one) in {int, float} and 0 <= one <= sys.float_info.max]
