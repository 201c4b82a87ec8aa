# SPDX-License-Identifier: Apache-2.0
"""Drawing artifacts at random, evenly over the slots, without reading all of them."""

from collections.abc import Mapping, Sequence
from random import Random

from sqlalchemy import Connection, Row, func, select

from poc_gateway.results.chunks import rows_within
from poc_gateway.store import schema
from poc_gateway.store.rounds import KnownRound

#: Vectors of one sample: all of them are held in memory at once, and then as text.
SAMPLE_BYTES = 8 * 2**20

#: nonce, vector, distance.
Drawn = Row[int, bytes | None, float | None]
_TABLE = schema.artifacts.c
_COLUMNS = select(_TABLE.nonce, _TABLE.vector, _TABLE.distance).order_by(_TABLE.nonce)


def draw(connection: Connection, known: KnownRound, count: int, seed: str) -> Sequence[Drawn]:
    """Return ``count`` artifacts in the order of (slot, nonce); all, if there are fewer, and fewer of long vectors.

    The same seed draws the same from the same artifacts. Every slot gives as many as every other, or all it has.
    """
    if known.terms.k_dim is not None:
        count = min(count, rows_within(SAMPLE_BYTES, known.terms.k_dim))
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
    first, last = connection.execute(select(func.min(_TABLE.nonce), func.max(_TABLE.nonce)).where(here)).one()
    aims = random.sample(range(first, last + 1, known.terms.node_count * known.terms.n_groups), count)
    drawn, free = list[Drawn](), first
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
