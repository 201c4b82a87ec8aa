# SPDX-License-Identifier: Apache-2.0
"""Reading what pods deliver, and checking it against the terms of its round."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from poc_gateway.errors import Refusal, invalid
from poc_gateway.rounds.registry import KnownRound
from poc_gateway.rounds.terms import RoundTerms
from vllm_poc.wire.artifacts import vector_bytes
from vllm_poc.wire.base import Protocol
from vllm_poc.wire.callbacks import Callback, GeneratedArtifacts, GeneratedDistances

#: Errors of one message that its answer repeats.
_MOST_ERRORS = 20

Message = TypeVar("Message", bound=Callback)
Value = bytes | float


class Fault(StrEnum):
    """Why an artifact is refused; also a metric's label."""

    MALFORMED = "Malformed"
    UNKNOWN_SLOT = "UnknownSlot"
    WRONG_NODE = "WrongNode"
    BAD_VECTOR = "BadVector"
    BAD_DISTANCE = "BadDistance"


class Refused(NamedTuple):
    """An artifact that is not stored; without a nonce if that could not be read."""

    nonce: int | None
    reason: Fault


class Found(NamedTuple):
    """An artifact that may be stored: the row of its slot, its nonce, and its vector or distance."""

    slot_id: int
    nonce: int
    value: Value


@dataclass
class Delivery:
    """What a message holds after every check."""

    known: KnownRound
    found: list[Found] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def read_generated(known: KnownRound, body: bytes) -> Delivery:
    """Check a ``/generated`` message; Refusal if it is of another round or cannot be read."""
    terms, delivery = known.terms, Delivery(known)
    if terms.protocol is Protocol.ARTIFACT:
        artifacts, delivery.refused = _parse(GeneratedArtifacts, ("artifacts",), body)
        require_same_round(terms, artifacts)
        _require_same("encoding.k_dim", artifacts.encoding.k_dim, terms.k_dim)
        vector = partial(vector_bytes, k_dim=artifacts.encoding.k_dim)
        items = ((artifact.nonce, artifact.vector_b64) for artifact in artifacts.artifacts)
        _sort(delivery, artifacts.node_id, items, vector, Fault.BAD_VECTOR)
    else:
        distances, delivery.refused = _parse(GeneratedDistances, ("nonces", "dist"), body)
        require_same_round(terms, distances)
        distance = partial(_distance, r_target=terms.r_target or 0.0)
        pairs = zip(distances.nonces, distances.dist, strict=True)
        _sort(delivery, distances.node_id, pairs, distance, Fault.BAD_DISTANCE)
    return delivery


def require_same_round(terms: RoundTerms, message: Callback) -> None:
    """Raise Refusal unless the message names the block and the key of the round."""
    for name in ("public_key", "block_hash", "block_height"):
        _require_same(name, getattr(message, name), getattr(terms, name))


def parse(model: type[Message], body: bytes) -> Message:
    """Return the message in ``body``; Refusal if it is none."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None


def _require_same(name: str, value: object, expected: object) -> None:
    if value != expected:
        detail = f"{name} is {value}, but the round that this address is of has {expected}: deliver to its own"
        raise Refusal(HTTPStatus.BAD_REQUEST, "WrongRound", detail)


def _parse(model: type[Message], lists: Sequence[str], body: bytes) -> tuple[Message, list[Refused]]:
    """Return the message, whose ``lists`` run parallel, without the entries that cannot be read."""
    try:
        message = model.model_validate_json(body)
        bad: set[int] = set()
    except ValidationError as error:
        bad = _bad_entries(error, lists)
    raw: Any = from_json(body) if bad else message.__dict__
    if len({len(raw[name]) for name in lists}) > 1:
        detail = f"{' and '.join(lists)} differ in length: send one entry of each per nonce"
        raise Refusal(HTTPStatus.BAD_REQUEST, "InvalidRequest", detail)
    if not bad:
        return message, []
    refused = [Refused(_nonce(raw[lists[0]][position]), Fault.MALFORMED) for position in sorted(bad)]
    good = {name: [entry for position, entry in enumerate(raw[name]) if position not in bad] for name in lists}
    return model.model_validate(raw | good), refused


def _bad_entries(error: ValidationError, lists: Sequence[str]) -> set[int]:
    positions = set()
    for entry in error.errors(include_url=False, include_context=False, include_input=False):
        where = entry["loc"]
        if len(where) == 1 or where[:1] == () or where[0] not in lists:
            raise _invalid(error) from None
        positions.add(int(where[1]))
    return positions


def _nonce(entry: Any) -> int | None:  # noqa: ANN401 - any JSON
    nonce = entry.get("nonce") if isinstance(entry, dict) else entry
    return nonce if isinstance(nonce, int) and not isinstance(nonce, bool) else None


def _invalid(error: ValidationError) -> Refusal:
    entries = error.errors(include_url=False, include_context=False, include_input=False)
    return invalid(HTTPStatus.BAD_REQUEST, entries[:_MOST_ERRORS])


Item = TypeVar("Item")


def _sort(
    delivery: Delivery,
    node_id: int,
    items: Iterable[tuple[int, Item]],
    value: Callable[[Item], Value],
    fault: Fault,
) -> None:
    slots, node_count = delivery.known.slots, delivery.known.terms.node_count
    stride = node_count * delivery.known.terms.n_groups
    for nonce, item in items:
        offset = nonce % stride
        slot_id = slots.get(offset)
        if slot_id is None:
            delivery.refused.append(Refused(nonce, Fault.UNKNOWN_SLOT))
        elif offset % node_count != node_id:
            delivery.refused.append(Refused(nonce, Fault.WRONG_NODE))
        else:
            try:
                delivery.found.append(Found(slot_id, nonce, value(item)))
            except ValueError:
                delivery.refused.append(Refused(nonce, fault))


def _distance(value: float, r_target: float) -> float:
    if not 0 <= value < r_target:
        raise ValueError
    return value
