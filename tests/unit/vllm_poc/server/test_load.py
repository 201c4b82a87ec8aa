# SPDX-License-Identifier: Apache-2.0
"""What waits for delivery counts by its results and by its bytes."""

from types import SimpleNamespace

import pytest

from vllm_poc.server.callbacks.delivery import Load, load_of
from vllm_poc.settings import Settings

SETTINGS = Settings.from_environment({"VLLM_POC_PENDING_RESULTS": "10", "VLLM_POC_PENDING_BYTES": "2048"})


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], Load(1, 0)),
        ([(1, "A" * 32), (2, "A" * 32)], Load(2, 64)),
        ([(1, 1.4), (2, 1.3), (3, 0.2)], Load(3, 96)),
        ([SimpleNamespace(nonces=[1, 2], valid=[True, False])], Load(1, 128)),
    ],
)
def test_results_count_by_their_length(items: list[object], expected: Load) -> None:
    assert load_of(items) == expected


@pytest.mark.parametrize(
    ("load", "full"),
    [
        (Load(9, 2047), False),
        (Load(10, 0), True),
        (Load(1, 2048), True),
    ],
)
def test_either_bound_holds_work_back(load: Load, full: bool) -> None:
    assert load.is_full(SETTINGS) is full


def test_what_was_delivered_leaves_room() -> None:
    load = load_of([(1, "A" * 4096)])
    assert load.is_full(SETTINGS)
    assert load + Load(2, 5) - load == Load(2, 5)
