# SPDX-License-Identifier: Apache-2.0
"""The formulas are tested on the device that computes them."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    """Make tensors on a GPU if there is one."""
    torch = pytest.importorskip("torch", reason="torch is not installed: run in the worker environment")
    from tests.support.builders.tensors import DEVICE  # noqa: PLC0415 - needs torch

    with torch.device(DEVICE):
        yield
