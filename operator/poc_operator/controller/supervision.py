# SPDX-License-Identifier: Apache-2.0
"""Background tasks that must not die unseen: a process that goes on without one of them would only look alive.

A task that fails ends the process, with its name in the log; so does one that ends although it is to run for ever.
Kubernetes starts another process, which adopts what runs.
"""

import asyncio
import logging
import os
from collections.abc import Coroutine
from functools import partial
from typing import Any

log = logging.getLogger(__name__)


def supervised(name: str, work: Coroutine[Any, Any, None], *, forever: bool = True) -> "asyncio.Task[None]":
    """Run it as a task whose failure ends the process, and whose end does too if it is to run ``forever``."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(partial(_ended, name, forever))
    return task


def _ended(name: str, forever: bool, task: "asyncio.Task[None]") -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is None and not forever:
        return
    log.critical("%s has ended unexpectedly: ending the process, so that another one takes over", name, exc_info=error)
    logging.shutdown()
    os._exit(1)
