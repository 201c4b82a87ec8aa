# SPDX-License-Identifier: Apache-2.0
"""How much one round may store, so that it leaves room for the others."""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from poc_gateway.errors import RETRY_AFTER, Refusal
from poc_gateway.ingest.deliveries import Delivery
from poc_gateway.store import schema
from poc_gateway.store.reserve import Room, result_bytes
from poc_gateway.store.rounds import KnownRound, RoundTerms
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

    def limit(self, k_dim: int | None) -> Limit:
        """Return the limit of a round with vectors of ``k_dim`` numbers, or with distances. It may wait for a disk."""
        found = [Limit(sys.maxsize, "nothing limits it")]
        if self._results:
            setting = "gateway.limits.resultsPerRound (POC_GATEWAY_ROUND_RESULTS)"
            found.append(Limit(self._results, f"{setting} allows {self._results}"))
        if self._percent and (volume := self._room.volume_bytes()) is not None:
            most = volume * self._percent // 100 // result_bytes(k_dim)
            setting = "gateway.limits.volumePercentPerRound (POC_GATEWAY_ROUND_VOLUME_PERCENT)"
            found.append(Limit(most, f"{setting} allows {self._percent} % of the volume, which are about {most}"))
        return min(found)


@dataclass
class Allowance:
    """How many more results a round may store. ``told`` is what its row says of a limit that it has reached."""

    left: int
    limit: Limit
    told: str | None
    counted: float


class Allowances:
    """How many more results each round may store. One per process.

    A round is counted once a second, by the write that stores something for it: no delivery waits for a reader. What
    this process stores until the next count is subtracted. So several processes together may exceed a limit by what
    they store in a second.
    """

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._known: dict[int, Allowance] = {}  # by the round's id

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

    def learn(self, known: KnownRound, stored: int | None) -> None:
        """Learn how many results of a delivery are stored, None if they were refused; log what changes for a round."""
        one = self._known.get(known.id)
        if one is None or stored == 0:
            return
        before, one.told = one.told, None if stored is not None else one.limit.why
        one.left -= stored or 0
        if one.told != before:
            with bound(round=known.terms.uid):
                if one.told is not None:
                    _log.error("new results of the round are refused: %s", one.told)
                else:
                    _log.info("new results of the round are stored again")

    def _count(self, connection: Connection, rounds: Mapping[int, RoundTerms], now: float) -> dict[int, Allowance]:
        slots, of_round = schema.slots.c, schema.rounds.c
        stored = select(func.sum(slots.stored)).where(slots.round_id == of_round.id).scalar_subquery()
        query = select(of_round.id, of_round.limit_reached, stored).where(of_round.id.in_(rounds))
        found = dict[int, Allowance]()
        for id_, told, count in connection.execute(query):
            limit = self._quota.limit(rounds[id_].k_dim)
            found[id_] = Allowance(max(0, limit.results - int(count or 0)), limit, told, now)
        return found


def round_full(terms: RoundTerms, new: int, left: int, limit: Limit) -> Refusal:
    """Return the refusal of ``new`` results of a round that may store ``left`` more."""
    detail = (
        f"{new} new results are too many for the round {terms.namespace}/{terms.name} ({terms.uid}), which may store "
        f"{left} more: {limit.why}. Raise that or end the round; the pod keeps its results and delivers them again"
    )
    return Refusal(HTTPStatus.INSUFFICIENT_STORAGE, "RoundFull", detail, headers=RETRY_AFTER)
