# SPDX-License-Identifier: Apache-2.0
"""How much one round may store, so that it leaves room for the others, and one slot, for the round's others.

Half of a round's limit is kept for its slots, for each as much; the other half is for whichever needs it. So a pod that
delivers more than it can have computed fills that half, and no other slot's share.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from sqlalchemy import Connection, select

from poc_gateway.errors import RETRY_AFTER, Refusal
from poc_gateway.ingest.deliveries import Delivery
from poc_gateway.store import schema
from poc_gateway.store.reserve import Room, result_bytes
from poc_gateway.store.rounds import MOST_KNOWN, RoundTerms
from vllm_poc.logs import bound

_log = logging.getLogger(__name__)

#: Seconds between two counts of what a round has stored.
COUNT_SECONDS = 1.0


class Limit(NamedTuple):
    """The most results that one round may have, and which setting says so."""

    results: int
    why: str


class Quota:
    """What one round may take, so that it leaves room for others: ``results``, and ``percent`` of the volume.

    0 is no limit. What results take on the volume is estimated, rather too high than too low.
    """

    def __init__(self, room: Room, *, results: int, percent: int) -> None:
        self._room = room
        self._results = results
        self._percent = percent

    @property
    def limits(self) -> bool:
        """Whether there is any limit."""
        return bool(self._results) or (bool(self._percent) and self._room.has_volume)

    def limit(self, value_bytes: int | None) -> Limit:
        """Return the limit of a round with results of ``value_bytes``, or with distances. It may wait for a disk."""
        found = [Limit(sys.maxsize, "nothing limits it")]
        if self._results:
            setting = "gateway.limits.resultsPerRound (POC_GATEWAY_ROUND_RESULTS)"
            found.append(Limit(self._results, f"{setting} allows {self._results}"))
        if self._percent and (volume := self._room.volume_bytes()) is not None:
            most = volume * self._percent // 100 // result_bytes(value_bytes)
            setting = "gateway.limits.volumePercentPerRound (POC_GATEWAY_ROUND_VOLUME_PERCENT)"
            found.append(Limit(most, f"{setting} allows {self._percent} % of the volume, which are about {most}"))
        return min(found)


@dataclass
class Allowance:
    """What a round may store. ``told`` is what its row says of a limit that it has reached.

    ``slots`` has the first nonces of its slots and ``stored`` their results, both by the slots' ids; ``full`` are the
    slots whose last new results were refused.
    """

    limit: Limit
    told: str | None
    counted: float
    slots: dict[int, int] = field(default_factory=dict)
    stored: Counter[int] = field(default_factory=Counter)
    full: set[int] = field(default_factory=set)

    @property
    def why(self) -> str:
        """Which limit the round has reached, and by whom."""
        if len(self.slots) < 2:  # noqa: PLR2004 - nothing to choose from
            return self.limit.why
        most = max(self.slots, key=lambda one: (self.stored[one], -one))
        return f"{self.limit.why}, of which half is kept for the slots in equal parts. Slot {self.slots[most]} has most"

    def left(self, slot_id: int, also: Counter[int]) -> int:
        """Return how many more results may be stored of a slot, when those of ``also`` are stored as well."""
        stored = {one: self.stored[one] + also[one] for one in self.slots}
        share, mine = self.limit.results // (2 * max(len(stored), 1)), stored.pop(slot_id, 0)
        unused = self.limit.results - mine - sum(stored.values())
        beyond_shares = self.limit.results - mine - sum(max(one, share) for one in stored.values())
        return max(0, min(unused, max(beyond_shares, share - mine)))


class Allowances:
    """How many more results each round may store. One per process.

    A round is counted once a second, by the write that stores something for it: no delivery waits for a reader. What
    this process stores until the next count is subtracted. So several processes together may exceed a limit by what
    they store in a second.
    """

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._known: dict[int, Allowance] = {}  # by the round's id
        self._full: dict[int, set[int]] = {}  # also those of rounds that are not counted at the moment

    def of(self, connection: Connection, deliveries: Sequence[Delivery]) -> Mapping[int, Allowance]:
        """Return the allowances of the deliveries' rounds by their ids; a round that is deleted has none."""
        if not self._quota.limits:
            return {}
        now = time.monotonic()
        found = {id_: one for id_, one in self._known.items() if now - one.counted < COUNT_SECONDS}
        rounds = {one.known.id: one.known.terms for one in deliveries if one.known.id not in found}
        if rounds:
            found |= self._count(connection, rounds, now)
        self._known = found
        return found

    def learn(self, delivery: Delivery, stored: Counter[int] | None) -> None:
        """Learn how many results of a delivery are stored, by slot; None if they were refused.

        What changes for its round is logged.
        """
        known = delivery.known
        one = self._known.get(known.id)
        if one is None or stored == Counter():
            return
        if stored is None:
            one.full.update(found.slot_id for found in delivery.checked)
        else:
            one.full.difference_update(stored)
            one.stored += stored
        self._remember(known.id, one.full)
        before, one.told = one.told, one.why if one.full else None
        if one.told != before:
            with bound(round=known.terms.uid):
                if one.told is not None:
                    _log.error("new results of the round are refused: %s", one.told)
                else:
                    _log.info("new results of the round are stored again")

    def _remember(self, round_id: int, full: set[int]) -> None:
        self._full.pop(round_id, None)
        if full:
            self._full[round_id] = full
        if len(self._full) > MOST_KNOWN:
            del self._full[next(iter(self._full))]

    def _count(self, connection: Connection, rounds: Mapping[int, RoundTerms], now: float) -> dict[int, Allowance]:
        slots, of_round = schema.slots.c, schema.rounds.c
        query = select(of_round.id, of_round.limit_reached, slots.id, slots.slot, slots.stored)
        found = dict[int, Allowance]()
        for id_, told, slot_id, slot, count in connection.execute(
            query.join(schema.slots, slots.round_id == of_round.id).where(of_round.id.in_(rounds))
        ):
            if (one := found.get(id_)) is None:
                limit, full = self._quota.limit(rounds[id_].value_bytes), self._full.get(id_, set())
                one = found[id_] = Allowance(limit, told, now, full=set(full))
            one.slots[slot_id], one.stored[slot_id] = slot, count
        return found


def round_full(terms: RoundTerms, new: int, left: int, why: str) -> Refusal:
    """Return the refusal of ``new`` results of a slot, of which its round may store ``left`` more."""
    detail = (
        f"{new} new results are too many for the round {terms.namespace}/{terms.name} ({terms.uid}), which may store "
        f"{left} more of this slot: {why}. Raise that or end the round; the pod keeps its results and delivers them "
        "again"
    )
    return Refusal(HTTPStatus.INSUFFICIENT_STORAGE, "RoundFull", detail, headers=RETRY_AFTER)
