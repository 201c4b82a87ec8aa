# SPDX-License-Identifier: Apache-2.0
"""A round at a glance: counts, arrivals, how its values are spread, how fast they came, and a sample of its artifacts.

A sample is drawn at random, evenly over the slots, without reading all of them.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from itertools import accumulate
from random import Random

from sqlalchemy import Connection, Row, func, select

from poc_gateway.query import queries
from poc_gateway.query.cursor import positions
from poc_gateway.query.export import arrow, chunks, rows_within
from poc_gateway.query.messages import ArtifactsQuery, Histogram, Rates, RoundEntry, SlotArrivals, Summary
from poc_gateway.store import schema
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound

_BINS = 20
#: Values are counted by so many places from 0 to the upper end: many, since honest distances lie close together.
_PLACES = 1000 * _BINS
#: Bins of distances reach at most so many times as far below the median as r_target is above it.
_LONGEST_TAIL = 6
#: Values that are looked at: enough to see what is wrong with them, few enough to be read at once.
SAMPLED_VALUES = 1_000
#: Distances of a round that has no more are all looked at; a round of a day has far too many.
MOST_COUNTED = 1_000_000
#: Upper end of the histogram of norms; an honest vector's is 1.
_LARGEST_NORM = 2.0

#: Spans of time that rates are told for, none shorter than a second, and results that they are estimated from.
MOST_SPANS, SAMPLED_ARRIVALS = 60, 1_200

#: Vectors of one sample: all of them are held in memory at once, and then as text.
SAMPLE_BYTES = 8 * 2**20

#: nonce, vector, distance.
Drawn = Row[int, bytes | None, float | None]
_TABLE = schema.artifacts.c
_COLUMNS = select(_TABLE.nonce, _TABLE.vector, _TABLE.distance).order_by(_TABLE.nonce)


async def summarise(database: Database, known: KnownRound) -> Summary:
    """Return the summary of a round; DatabaseError if the database fails."""
    entry, slots = await database.read(lambda connection: _counts(connection, known))
    first, last = _ends(slots)
    seconds = (last - first).total_seconds() if first and last else 0.0
    return Summary(
        round=entry,
        first_arrival=first,
        last_arrival=last,
        rate=round(entry.stored / seconds, 3) if seconds > 0 else None,
        histogram=await _histogram(database, known, entry.stored),
        slots=slots,
    )


def _ends(slots: Iterable[SlotArrivals], more: Sequence[datetime] = ()) -> tuple[datetime | None, datetime | None]:
    """Return the first and the last of these arrivals, and of ``more``; the first nonce of a slot may come last."""
    told = [arrival for slot in slots for arrival in (slot.first_arrival, slot.last_arrival) if arrival]
    arrivals = [*told, *more]
    return min(arrivals, default=None), max(arrivals, default=None)


def rates(connection: Connection, known: KnownRound) -> Rates:
    """Return how fast the results of a round arrived over time; of a large round it is estimated from some of them."""
    slots = queries.slot_arrivals(connection, known)
    stored = {slot.slot: slot.stored for slot in slots}
    arrived = _arrived(connection, known, stored)
    first, last = _ends(slots, [queries.moment(moment) for moment, _ in arrived])
    began = first.timestamp() if first else 0.0
    span = last.timestamp() - began if last else 0.0
    spans = max(1, min(MOST_SPANS, int(span))) if span > 0 else 0
    counts = [0.0] * spans
    for moment, weight in arrived if spans else ():
        # The last moment belongs to the last span.
        counts[max(0, min(int((moment / 1000 - began) / span * spans), spans - 1))] += weight
    return Rates(
        first_arrival=first,
        last_arrival=last,
        seconds=round(span / spans, 3) if spans else 0.0,
        rates=[float(f"{count * spans / span:.5g}") for count in counts],
        counted=len(arrived),
        sampled=len(arrived) < sum(stored.values()),
    )


def histogram(quantity: str, places: Mapping[int, int], end: float, *, sampled: bool, first: int = 0) -> Histogram:
    """Return how many values lie in each bin from place ``first`` to ``end``.

    ``places`` counts values by place: of `_PLACES` up to ``end``, and beyond them what is above.
    """
    width = (_PLACES - first) // _BINS
    counts = [0] * _BINS
    for place, count in places.items():
        if first <= place < _PLACES:
            counts[(place - first) // width] += count
    return Histogram(
        quantity=quantity,
        edges=[end * (first + width * number) / _PLACES for number in range(_BINS + 1)],
        counts=counts,
        below=sum(count for place, count in places.items() if place < first),
        above=sum(count for place, count in places.items() if place >= _PLACES),
        counted=sum(places.values()),
        sampled=sampled,
    )


def _of_distances(places: Mapping[int, int], r_target: float, *, sampled: bool) -> Histogram:
    """Return a histogram from about the smallest distance on: with bins from 0 honest ones are all in the last.

    One that is far from all others counts as below, since bins that reach to it would hide how the others lie.
    """
    within = {place: count for place, count in places.items() if 0 <= place < _PLACES}
    if not within:
        return histogram("distance", places, r_target, sampled=sampled)
    median = _median(within)
    first = min(place for place in within if place >= median - _LONGEST_TAIL * (_PLACES - median))
    return histogram("distance", places, r_target, sampled=sampled, first=first - first % _BINS)


def _median(places: Mapping[int, int]) -> int:
    ordered, half = sorted(places), sum(places.values()) / 2
    passed = accumulate(places[place] for place in ordered)
    return next(place for place, count in zip(ordered, passed, strict=True) if count >= half)


def _counts(connection: Connection, known: KnownRound) -> tuple[RoundEntry, list[SlotArrivals]]:
    return queries.round_entry(connection, known), queries.slot_arrivals(connection, known)


async def _histogram(database: Database, known: KnownRound, stored: int) -> Histogram:
    r_target = known.terms.r_target
    if r_target is not None and stored <= MOST_COUNTED:
        return _of_distances(await _places_of_distances(database, known, r_target), r_target, sampled=False)
    drawn = await database.read(lambda connection: draw(connection, known, SAMPLED_VALUES, "summary"))
    if r_target is not None:
        places = _placed([each.distance for each in drawn if each.distance is not None], r_target)
        return _of_distances(places, r_target, sampled=True)
    if known.terms.max_tokens is not None:
        points = [float(point) for each in drawn for point in each.vector or b""]
        # One bin for each, and some to spare.
        return histogram("index of the codebook", _placed(points, _BINS), _BINS, sampled=True)
    norms = [math.hypot(*struct.unpack(f"<{known.terms.k_dim}e", each.vector or b"")) for each in drawn]
    return histogram("vector norm", _placed(norms, _LARGEST_NORM), _LARGEST_NORM, sampled=True)


def _placed(values: Sequence[float], end: float) -> Mapping[int, int]:
    return Counter(min(math.floor(value / end * _PLACES), _PLACES) for value in values)


async def _places_of_distances(database: Database, known: KnownRound, end: float) -> Mapping[int, int]:
    places = Counter[int]()
    reached = await database.read(lambda connection: positions(connection, known))
    async with aclosing(chunks(database, known, ArtifactsQuery(), {}, reached)) as tables:
        async for table in tables:
            pc = arrow().compute
            scaled = pc.floor(pc.multiply(pc.divide(table["value"], end), float(_PLACES)))
            counted = pc.value_counts(pc.min_element_wise(scaled, float(_PLACES)))
            places.update({int(entry["values"]): entry["counts"] for entry in counted.to_pylist()})
    return places


def draw(connection: Connection, known: KnownRound, count: int, seed: str) -> Sequence[Drawn]:
    """Return ``count`` artifacts in the order of (slot, nonce); all, if there are fewer, and fewer of long vectors.

    The same seed draws the same from the same artifacts. Every slot gives as many as every other, or all it has.
    """
    if known.terms.value_bytes is not None:
        count = min(count, rows_within(SAMPLE_BYTES, known.terms.value_bytes))
    random = Random(f"{known.terms.uid}/{seed}")  # noqa: S311 - a sample that can be drawn again, not a secret
    slots = schema.slots.c
    stored = connection.execute(select(slots.slot, slots.stored).where(slots.round_id == known.id))
    shares = share({row.slot: row.stored for row in stored}, count, random)
    drawn = list[Drawn]()
    for offset in sorted(shares):
        drawn += _draw_from(connection, known, offset, shares[offset], random)
    return drawn


def share(stored: Mapping[int, int], count: int, random: Random) -> Mapping[int, int]:
    """Return how many of ``count`` each slot gives; what the small ones lack is spread over the others."""
    order = sorted(stored)
    random.shuffle(order)
    shares, left = dict[int, int](), count
    for place, offset in enumerate(sorted(order, key=lambda each: stored[each])):
        shares[offset] = min(stored[offset], left // (len(order) - place))
        left -= shares[offset]
    return shares


def _draw_from(connection: Connection, known: KnownRound, offset: int, count: int, random: Random) -> Sequence[Drawn]:
    """Aim at random nonces of the slot and take the next stored one of each, never one twice."""
    if not count:
        return ()
    here = _TABLE.slot_id == known.slots[offset]
    ends = _nonce_ends(connection, known.slots[offset])
    if ends is None:
        return ()
    nonces = range(ends[0], ends[1] + 1, known.terms.node_count * known.terms.n_groups)
    aims = random.sample(nonces, min(count, len(nonces)))
    drawn, free = list[Drawn](), nonces.start
    for aim in sorted(aims):
        found = connection.execute(_COLUMNS.where(here, _TABLE.nonce >= max(aim, free)).limit(1)).first()
        if found is None:
            break
        drawn.append(found)
        free = found.nonce + 1
    if len(drawn) < count:
        # Aims beyond the last free nonce: begin again at the front, where at most len(drawn) are taken.
        taken = {each.nonce for each in drawn}
        front = connection.execute(_COLUMNS.where(here).limit(count))
        drawn += [each for each in front if each.nonce not in taken][: count - len(drawn)]
    return sorted(drawn, key=lambda each: each.nonce)


def _arrived(connection: Connection, known: KnownRound, stored: Mapping[int, int]) -> Sequence[tuple[int, float]]:
    """Return when results arrived, in milliseconds, each with how many of the round it stands for."""
    random = Random(f"{known.terms.uid}/arrivals")  # noqa: S311 - an even choice, not a secret
    shares = share(stored, SAMPLED_ARRIVALS, random)
    # With more slots than that some give none: the others stand for them.
    scale = sum(stored.values()) / max(1, sum(stored[offset] for offset in shares if shares[offset]))
    found = list[tuple[int, float]]()
    for offset in (each for each in shares if shares[each]):
        moments = _moments(
            connection, known.slots[offset], shares[offset], random, every=shares[offset] == stored[offset]
        )
        found += [(moment, scale * stored[offset] / len(moments)) for moment in moments]
    return found


def _moments(connection: Connection, slot_id: int, count: int, random: Random, *, every: bool) -> Sequence[int]:
    """Return when ``count`` results of a slot arrived, evenly over its nonces; fewer, if nonces are missing."""
    here = _TABLE.slot_id == slot_id
    if every:
        return list(connection.scalars(select(_TABLE.received_at).where(here)))
    ends = _nonce_ends(connection, slot_id)
    if ends is None:
        return []
    first, last = ends
    step = (last + 1 - first) / count
    start, query = first + random.random() * step, select(_TABLE.nonce, _TABLE.received_at).where(here)
    # Two aims in a gap find the same result: it counts once.
    found = dict[int, int]()
    for place in range(count):
        aim = int(start + place * step)
        row = connection.execute(query.where(_TABLE.nonce >= aim).order_by(_TABLE.nonce).limit(1)).first()
        if row is not None:
            found[row.nonce] = row.received_at
    return list(found.values())


def _nonce_ends(connection: Connection, slot_id: int) -> tuple[int, int] | None:
    """Return the first and the last nonce of a slot; None if its round was deleted since the slot was counted."""
    # Each by itself: SQLite looks through the whole slot for both at once.
    here = _TABLE.slot_id == slot_id
    first, last = (
        connection.execute(select(end(_TABLE.nonce)).where(here)).scalar_one() for end in (func.min, func.max)
    )
    return None if first is None or last is None else (first, last)
