# SPDX-License-Identifier: Apache-2.0
"""A round at a glance: counts, arrivals, and how its values are spread."""

import math
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing

import pyarrow.compute as pc
from sqlalchemy import Connection

from poc_gateway.results import queries
from poc_gateway.results.answers import Histogram, RoundEntry, SlotArrivals, Summary
from poc_gateway.results.chunks import chunks
from poc_gateway.results.parameters import ArtifactsQuery
from poc_gateway.results.sampling import draw
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound

_BINS = 20
#: Vectors that are looked at: enough to see what is wrong with them, few enough to be read at once.
SAMPLED_VECTORS = 1_000
#: Upper end of the histogram of norms; an honest vector's is 1.
_LARGEST_NORM = 2.0


async def summarise(database: Database, known: KnownRound) -> Summary:
    """Return the summary of a round; DatabaseError if the database fails."""
    entry, slots = await database.read(lambda connection: _counts(connection, known))
    first = min((slot.first_arrival for slot in slots if slot.first_arrival), default=None)
    last = max((slot.last_arrival for slot in slots if slot.last_arrival), default=None)
    seconds = (last - first).total_seconds() if first and last else 0.0
    return Summary(
        round=entry,
        first_arrival=first,
        last_arrival=last,
        rate=round(entry.stored / seconds, 3) if seconds > 0 else None,
        histogram=await _histogram(database, known),
        slots=slots,
    )


def histogram(quantity: str, places: Mapping[int, int], end: float, *, sampled: bool) -> Histogram:
    """Return how many values lie in each bin from 0 to ``end``; ``places`` counts them by bin, `_BINS` being above."""
    above = places.get(_BINS, 0)
    return Histogram(
        quantity=quantity,
        edges=[end * place / _BINS for place in range(_BINS + 1)],
        counts=[places.get(place, 0) for place in range(_BINS)],
        above=above,
        counted=sum(places.values()),
        sampled=sampled,
    )


def _counts(connection: Connection, known: KnownRound) -> tuple[RoundEntry, list[SlotArrivals]]:
    return queries.round_entry(connection, known), queries.slot_arrivals(connection, known)


async def _histogram(database: Database, known: KnownRound) -> Histogram:
    if known.terms.r_target is not None:
        places = await _places_of_distances(database, known, known.terms.r_target)
        return histogram("distance", places, known.terms.r_target, sampled=False)
    drawn = await database.read(lambda connection: draw(connection, known, SAMPLED_VECTORS, "summary"))
    norms = (math.hypot(*struct.unpack(f"<{known.terms.k_dim}e", each.vector or b"")) for each in drawn)
    places = Counter(min(int(norm / _LARGEST_NORM * _BINS), _BINS) for norm in norms)
    return histogram("vector norm", places, _LARGEST_NORM, sampled=True)


async def _places_of_distances(database: Database, known: KnownRound, end: float) -> Mapping[int, int]:
    places = Counter[int]()
    async with aclosing(chunks(database, known, ArtifactsQuery())) as tables:
        async for table in tables:
            scaled = pc.floor(pc.multiply(pc.divide(table["value"], end), float(_BINS)))
            counted = pc.value_counts(pc.min_element_wise(scaled, float(_BINS)))
            places.update({int(entry["values"]): entry["counts"] for entry in counted.to_pylist()})
    return places
