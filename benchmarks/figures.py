# SPDX-License-Identifier: Apache-2.0
"""Figures for people and for programs."""

import json
from collections.abc import Mapping, Sequence

Figures = Mapping[str, float | int | str]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def spread(name: str, values: Sequence[float]) -> Figures:
    """Return the median, the 95th and 99th percentile and the maximum of times in seconds."""
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {f"{name}_{word}": round(quantile(values, share), 2) for word, share in shares.items()}


def report(title: str, figures: Figures) -> None:
    """Print a line for each figure, and all of them as one line of JSON."""
    print(title)
    for name, value in figures.items():
        print(f"  {name:32} {value}")
    print(json.dumps({"benchmark": title, **figures}), flush=True)
