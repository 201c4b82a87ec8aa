# SPDX-License-Identifier: Apache-2.0
"""Work that the device does beside its main work; without a side stream, in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside(side: torch.cuda.Stream | None) -> Iterator[None]:
    """Enqueue what is called here on ``side``, behind all that was enqueued so far.

    What it makes may be read after `joined`, and must be let go before this is entered again.
    """
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


def joined(side: torch.cuda.Stream | None) -> None:
    """Let all that is enqueued from here on wait for ``side``."""
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
