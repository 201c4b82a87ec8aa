# SPDX-License-Identifier: Apache-2.0
"""Reading what pods deliver, and checking it against the terms of its round."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, TypeVar

from poc_gateway.collector.parsing import Fault, Refused, parse_artifacts, parse_distances
from poc_gateway.errors import Refusal
from poc_gateway.store.rounds import KnownRound, RoundTerms
from vllm_poc.wire.artifacts import vector_bytes
from vllm_poc.wire.base import Protocol
from vllm_poc.wire.callbacks import Callback

Value = bytes | float


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
        artifacts, delivery.refused = parse_artifacts(body)
        require_same_round(terms, artifacts)
        _require_same("encoding.k_dim", artifacts.encoding.k_dim, terms.k_dim)
        vector = partial(vector_bytes, k_dim=artifacts.encoding.k_dim)
        items = ((artifact.nonce, artifact.vector_b64) for artifact in artifacts.artifacts)
        _sort(delivery, artifacts.node_id, items, vector, Fault.BAD_VECTOR)
    else:
        distances, delivery.refused = parse_distances(body)
        require_same_round(terms, distances)
        distance = partial(_distance, r_target=terms.r_target or 0.0)
        pairs = zip(distances.nonces, distances.dist, strict=True)
        _sort(delivery, distances.node_id, pairs, distance, Fault.BAD_DISTANCE)
    return delivery


def require_same_round(terms: RoundTerms, message: Callback) -> None:
    """Raise Refusal unless the message names the block and the key of the round."""
    for name in ("public_key", "block_hash", "block_height"):
        _require_same(name, getattr(message, name), getattr(terms, name))


def _require_same(name: str, value: object, expected: object) -> None:
    if value != expected:
        detail = f"{name} is {value}, but the round that this address is of has {expected}: deliver to its own"
        raise Refusal(HTTPStatus.BAD_REQUEST, "WrongRound", detail)


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
