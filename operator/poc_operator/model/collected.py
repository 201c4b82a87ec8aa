# SPDX-License-Identifier: Apache-2.0
"""What the gateway tells the operator of a round: how much of it is stored.

The names are snake_case on the wire, as all that pods and the gateway say.
"""

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
