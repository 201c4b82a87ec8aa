# SPDX-License-Identifier: Apache-2.0
"""When an object's loop took its turns."""

import time
from typing import Any

from poc_operator.controller.reconciler import Reconciler


def note_turns(reconciler: Reconciler[Any]) -> list[float]:
    """Return the times of the reconciler's turns, to which each one from now on is added."""
    turns, reconcile = list[float](), reconciler.reconcile

    async def noted() -> bool:
        turns.append(time.monotonic())
        return await reconcile()

    reconciler.reconcile = noted  # type: ignore[method-assign]
    return turns
