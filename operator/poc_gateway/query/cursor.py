# SPDX-License-Identifier: Apache-2.0
"""The cursor of exports: how far each slot of a round was read, as a text that a client hands back.

A slot is read up to its largest nonce at that moment. What arrives later is above that nonce, or it has a number in
``late_arrivals`` above those that there were. So has what a decision replaces later. So two positions of a slot bound
what came between them, whatever arrives meanwhile.

The text is base64url of a checksum and of: the round's uid (hashed) and id, a stamp, and both numbers of each slot. The
stamp is made of the moments at which the last artifacts arrived. It differs if they are other ones: after a restore of
the database, or if the round was deleted and began anew.
"""

import hashlib
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import accumulate, pairwise
from struct import Struct, error
from typing import NamedTuple

from sqlalchemy import CTE, BigInteger, Connection, Select, column, select, values

from poc_gateway.errors import Refusal, field_refusal
from poc_gateway.outbox.ledger import in_parts
from poc_gateway.store.rounds import KnownRound
from poc_gateway.store.schema import artifacts, late_arrivals, slots

_CHECK = Struct(">I")
#: Hash of the uid, id of the round, stamp.
_HEAD = Struct(">8sQI")
#: Most bytes of a slot's two numbers, of which each byte has seven bits, and one that says whether more follow.
_SLOT_BYTES = 20
_SHIFT, _BITS, _MORE, _MOST_SHIFT = 7, 0x7F, 0x80, 70


class Position(NamedTuple):
    """How far a slot is, or was read: its largest nonce (-1 without any), and its largest number of a late arrival."""

    nonce: int
    late: int


#: By the slot's first nonce.
Positions = Mapping[int, Position]
BEGIN = Position(-1, 0)


def positions(connection: Connection, known: KnownRound) -> Positions:
    """Return how far the slots of a round are: all of them at one moment."""
    query = select(slots.c.slot, slots.c.last_nonce, slots.c.late).where(slots.c.round_id == known.id)
    return {slot: Position(nonce, late) for slot, nonce, late in connection.execute(query)}


def cursor_of(connection: Connection, known: KnownRound, reached: Positions) -> str:
    """Return the text for what was read of a round."""
    stride = known.terms.node_count * known.terms.n_groups
    offsets = sorted(known.slots)
    found = [reached.get(offset, BEGIN) for offset in offsets]
    indices = [max(0, (one.nonce - offset) // stride + 1) for offset, one in zip(offsets, found, strict=True)]
    packed = zlib.compress(bytes(_packed([*indices, *(one.late for one in found)])), 9)
    body = _HEAD.pack(_hash(known), known.id, _stamp(connection, known, reached)) + packed
    return urlsafe_b64encode(_CHECK.pack(zlib.crc32(body)) + body).decode().rstrip("=")


def read_cursor(connection: Connection, known: KnownRound, text: str) -> Positions:
    """Return what a cursor says was read.

    Refusal with 422 if it is none of this round, and with 410 if what it was made of is not stored any more.
    """
    body = _checked(text)
    uid_hash, round_id, stamp = _HEAD.unpack_from(body)
    if uid_hash != _hash(known):
        raise field_refusal("since", "is a cursor of another round: name that one by uid, or leave since out")
    offsets, stride = sorted(known.slots), known.terms.node_count * known.terms.n_groups
    numbers = _unpacked(body[_HEAD.size :], 2 * len(offsets))
    if round_id != known.id or numbers is None:
        raise _gone()
    indices, late = numbers[: len(offsets)], numbers[len(offsets) :]
    read = {
        offset: Position(offset + (index - 1) * stride if index else -1, number)
        for offset, index, number in zip(offsets, indices, late, strict=True)
    }
    if stamp != _stamp(connection, known, read):
        raise _gone()
    return read


def _stamp(connection: Connection, known: KnownRound, reached: Positions) -> int:
    """Return a checksum of when the last artifact of each slot arrived, and the last late one."""
    last = [(known.slots[offset], one.nonce) for offset, one in reached.items() if one.nonce >= 0]
    late = [(known.slots[offset], one.late) for offset, one in reached.items() if one.late]
    found = [row for some in in_parts(last) for row in connection.execute(_moments(some))]
    found += [row for some in in_parts(late) for row in connection.execute(_late_moments(some))]
    return zlib.crc32(repr(sorted(map(tuple, found))).encode())


# From the pairs to the rows, each by its key: SQLite reads the whole table for a key that is IN a list of pairs.


def _moments(pairs: Sequence[tuple[int, int]]) -> Select[int, int, int]:
    wanted, own = _wanted(pairs), artifacts.c
    is_wanted = (own.slot_id == wanted.c.slot_id) & (own.nonce == wanted.c.number)
    return select(own.slot_id, own.nonce, own.received_at).select_from(wanted).join(artifacts, is_wanted)


def _late_moments(pairs: Sequence[tuple[int, int]]) -> Select[int, int, int]:
    wanted, own, late = _wanted(pairs), artifacts.c, late_arrivals.c
    is_wanted = (late.slot_id == wanted.c.slot_id) & (late.number == wanted.c.number)
    same = (own.slot_id == late.slot_id) & (own.nonce == late.nonce)
    columns = select(late.slot_id, late.number, own.received_at).select_from(wanted)
    return columns.join(late_arrivals, is_wanted).join(artifacts, same)


def _wanted(pairs: Sequence[tuple[int, int]]) -> CTE:
    columns = column("slot_id", BigInteger), column("number", BigInteger)
    return values(*columns, name="wanted").data(list(pairs)).cte("wanted")


def _checked(text: str) -> bytes:
    try:
        raw = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
        (check,) = _CHECK.unpack_from(raw)
    except (ValueError, error):
        raw, check = b"", 0
    body = raw[_CHECK.size :]
    if len(body) < _HEAD.size or zlib.crc32(body) != check:
        raise field_refusal(
            "since", "is no cursor: send X-Next-Since of an export of this round as it was, or leave it out"
        )
    return body


def _gone() -> Refusal:
    detail = (
        "since: what this cursor was made of is not stored any more, because the round was deleted and began anew or "
        "the database was restored: export the round again without since"
    )
    return Refusal(HTTPStatus.GONE, "CursorExpired", detail)


def _hash(known: KnownRound) -> bytes:
    return hashlib.sha256(known.terms.uid.encode()).digest()[:8]


def _packed(numbers: Sequence[int]) -> Iterator[int]:
    """Yield the differences of neighbours, which are small, each in as few bytes as it takes, seven bits in each."""
    for before, number in pairwise([0, *numbers]):
        difference = number - before
        left = difference << 1 if difference >= 0 else (-difference << 1) - 1
        while left >= _MORE:
            yield left & _BITS | _MORE
            left >>= _SHIFT
        yield left


def _unpacked(packed: bytes, count: int) -> list[int] | None:
    """Return ``count`` numbers; None if these are not so many, or none that can be."""
    try:
        data = zlib.decompressobj().decompress(packed, count * _SLOT_BYTES + 1)
    except zlib.error:
        return None
    numbers = list(accumulate(_differences(data)))
    fits = len(numbers) == count and all(0 <= number < 2**63 for number in numbers)
    return numbers if fits else None


def _differences(data: Iterable[int]) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value |= (byte & _BITS) << shift
        shift += _SHIFT
        if shift > _MOST_SHIFT:
            return
        if byte < _MORE:
            yield value >> 1 if value % 2 == 0 else -((value + 1) >> 1)
            value = shift = 0
