# SPDX-License-Identifier: Apache-2.0
"""What a callback receiver got, sorted by the slots of the round."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from tests.support.fakes.receiver import Receiver
from vllm_poc.wire.artifacts import decode_vector, encode_vector
from vllm_poc.wire.messages import DEFAULT_K_DIM
from vllm_poc.wire.partition import NonceSlot

Body = dict[str, Any]
#: A distance, or a vector in base64.
Value = float | str


def slots(round_: PoCRound) -> list[tuple[Assignment, NonceSlot]]:
    """Return every slot of the round with its residue class."""
    count, groups = round_.spec.nodes.count, round_.status.groups
    return [
        (slot, NonceSlot(node_id=slot.node, node_count=count, group_id=slot.group, n_groups=groups))
        for slot in round_.status.assignments
    ]


def items(bodies: Iterable[Body]) -> Iterator[tuple[int, Value]]:
    """Yield each nonce with its value, in order of arrival."""
    for body in bodies:
        if "artifacts" in body:
            yield from ((artifact["nonce"], artifact["vector_b64"]) for artifact in body["artifacts"])
        else:
            yield from zip(body["nonces"], body["dist"], strict=True)


def indices_by_slot(round_: PoCRound, receiver: Receiver) -> list[tuple[Assignment, list[int]]]:
    """Return what arrived for each slot as indices of its nonces, in order of arrival.

    A nonce that belongs to no slot of the round, or a body of another round, fails the test.
    """
    owners = {partition.offset: (slot, partition, list[int]()) for slot, partition in slots(round_)}
    for body in list(receiver.bodies):
        _check_header(round_, body)
        for nonce, _ in items([body]):
            slot, partition, indices = owners[nonce % slot_count(round_)]
            assert slot.node == body["node_id"]
            indices.append(partition.index(nonce))
    return [(slot, indices) for slot, _, indices in owners.values()]


def slot_count(round_: PoCRound) -> int:
    """Return the number of residue classes of the round, which is the stride of each."""
    assert round_.status.slots == round_.spec.nodes.count * round_.status.groups
    return round_.status.slots


def elsewhere(vector: str, stat_test: Mapping[str, float]) -> str:
    """Return a vector that lies further from the given one than the fraud test lets pass."""
    values = decode_vector(vector, DEFAULT_K_DIM)
    negated = [-value for value in values]
    assert math.dist(values, negated) > stat_test["dist_threshold"]
    return encode_vector(negated)


def _check_header(round_: PoCRound, body: Body) -> None:
    spec = round_.spec
    header = (body["block_hash"], body["block_height"], body["public_key"])
    assert header == (spec.block_hash, spec.block_height, spec.public_key)
