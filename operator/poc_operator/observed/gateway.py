# SPDX-License-Identifier: Apache-2.0
"""What the gateway has told of a round, as it stands in its answers, and as one plan sees it.

The names are snake_case on the wire, as all that pods and the gateway say.
"""

from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel, ConfigDict


class CollectedSlot(BaseModel):
    """One slot; ``slot`` is its first nonce.

    ``last_nonce`` is the largest nonce stored, -1 without any; pods deliver in order, so that every index before
    ``delivered_index`` is settled. ``duplicates`` and ``conflicts`` count deliveries of nonces that were stored
    already, with the same and with other content; ``forwarded`` what the round's receiver has accepted.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    slot: int
    stored: int
    last_nonce: int
    delivered_index: int
    duplicates: int
    conflicts: int
    forwarded: int


class CollectedRound(BaseModel):
    """A round, and the sums over its slots."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    uid: str
    stored: int
    duplicates: int
    conflicts: int
    forwarded: int
    slots: list[CollectedSlot]


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
