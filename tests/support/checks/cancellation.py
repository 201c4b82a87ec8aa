# SPDX-License-Identifier: Apache-2.0
"""Whether a task ends that is cancelled just as what it waits for comes."""

import asyncio
from collections.abc import Callable

#: Turns of the event loop between the news and the cancellation: a wait may take several to end.
TURNS = range(8)
END_SECONDS = 3.0


async def ends_cancelled(task: "asyncio.Task[None]", wake: Callable[[], object], turns: int) -> None:
    """Wake the task and cancel it so many turns later; it must end so, unless it had ended before."""
    wake()
    for _ in range(turns):
        await asyncio.sleep(0)
    was_running = task.cancel()
    ended, _ = await asyncio.wait([task], timeout=END_SECONDS)
    if not ended:
        task.cancel()
        await asyncio.wait([task])
    assert ended, f"the task went on, cancelled {turns} turns after the news"
    assert task.cancelled() == was_running
