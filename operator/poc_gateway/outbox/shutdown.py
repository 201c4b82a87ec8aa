# SPDX-License-Identifier: Apache-2.0
"""Ending without losing what a receiver has just accepted."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

#: At the gateway's end a post in flight has this long to be answered and written down.
FINISH_SECONDS = 10.0


async def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """Await ``work``, and if cancelled meanwhile, give it FINISH_SECONDS before it is cancelled too."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=FINISH_SECONDS)
        task.cancel()
        raise
