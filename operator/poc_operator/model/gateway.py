# SPDX-License-Identifier: Apache-2.0
"""The gateway as one round sees it."""

from dataclasses import dataclass
from datetime import datetime

from poc_operator.model.collected import CollectedRound


@dataclass(frozen=True, kw_only=True)
class GatewayReport:
    """Where the round's pods deliver to, and what of it is stored.

    ``collected`` is what the gateway answered last, None if it had nothing then; ``asked`` is when that question was
    put, None if none was answered yet. ``error`` says why the last question was not answered.
    """

    callback: str
    collected: CollectedRound | None = None
    asked: datetime | None = None
    error: str | None = None
