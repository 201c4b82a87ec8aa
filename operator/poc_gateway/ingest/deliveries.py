# SPDX-License-Identifier: Apache-2.0
"""What pods deliver: read as it is written, then checked against the terms of its round.

A message may be anything: what reading it takes stays in proportion to its size.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import ConfigDict, FailFast, TypeAdapter, ValidationError
from pydantic_core import from_json

from poc_gateway.errors import Refusal, invalid
from poc_gateway.store.rounds import KnownRound, RoundTerms
from poc_operator.credentials import Grant
from vllm_poc.wire.artifacts import Artifact, chain_bytes, vector_bytes
from vllm_poc.wire.callbacks import Callback, GeneratedArtifacts, GeneratedDistances
from vllm_poc.wire.messages import Nonce, Protocol

#: Where a request's state has the grant of the pod that delivers.
GRANT = "grant"
#: Reasons why a message as a whole is refused that its pod must not send.
NOT_GRANTED = frozenset({"OtherSlot", "BeyondReach"})
#: Values of one message: four lists of 100 000, the nonces that one request may name, with room to spare.
MOST_VALUES = 500_000
#: The same where each nonce has a chain: 5 000 chains of 256 steps. They take up to 80 MB for a moment.
MOST_CHAIN_VALUES = 1_500_000
#: Entries of one message that may be unreadable. A pod halves what is refused, until those are alone that are bad.
MOST_MALFORMED = 1_000

Message = TypeVar("Message", bound=Callback)
Item = TypeVar("Item")
Value = bytes | float


class Fault(StrEnum):
    """Why an artifact is refused; also a metric's label."""

    MALFORMED = "Malformed"
    UNKNOWN_SLOT = "UnknownSlot"
    WRONG_NODE = "WrongNode"
    BAD_VECTOR = "BadVector"
    BAD_CHAIN = "BadChain"
    BAD_DISTANCE = "BadDistance"


class Refused(NamedTuple):
    """An artifact that is not stored; without a nonce if that could not be read."""

    nonce: int | None
    reason: Fault


class CheckedArtifact(NamedTuple):
    """An artifact that may be stored: the row of its slot, its nonce, and its vector, chain or distance."""

    slot_id: int
    nonce: int
    value: Value


@dataclass
class Delivery:
    """What a message holds after every check, and what the pod may deliver that sent it; None if that is not known.

    ``author`` is the pod's row in ``authors``.
    """

    known: KnownRound
    grant: Grant | None = None
    author: int | None = None
    checked: list[CheckedArtifact] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


class Generated(NamedTuple):
    """A ``/generated`` message without the entries that cannot be read, and these."""

    message: GeneratedArtifacts | GeneratedDistances
    refused: Sequence[Refused]


def read_generated(known: KnownRound, body: bytes, grant: Grant | None = None) -> Delivery:
    """Check a ``/generated`` message; Refusal if it is of another round, beyond its ``grant``, or cannot be read."""
    return check_generated(known, parse_generated(known.terms.protocol, body), grant)


def parse_generated(protocol: Protocol, body: bytes) -> Generated:
    """Return the ``/generated`` message in ``body``; Refusal if it is none of the protocol."""
    if protocol is Protocol.DISTANCE:
        return Generated(*parse_distances(body))
    return Generated(*parse_artifacts(body, most_values(protocol)))


def most_values(protocol: Protocol) -> int:
    """Return how many values a message of the protocol may have."""
    return MOST_CHAIN_VALUES if protocol is Protocol.DECODE else MOST_VALUES


def check_generated(known: KnownRound, generated: Generated, grant: Grant | None = None) -> Delivery:
    """Check a message of the round's protocol.

    Refusal if it is of another round, or of another codebook than the network's, or beyond its ``grant``.
    """
    terms, message = known.terms, generated.message
    delivery = Delivery(known, grant, refused=list(generated.refused))
    require_same_round(terms, message)
    if isinstance(message, GeneratedArtifacts):
        require_networks_codebook(rebuilt=message.rebuilt_codebook)
    if isinstance(message, GeneratedArtifacts) and terms.max_tokens is not None:
        # What a pod may send of a vector beside its chain is evidence for itself, and no result.
        chain, steps = partial(chain_bytes, max_tokens=terms.max_tokens), "k_points_steps"
        chains = ((artifact["nonce"], artifact.get(steps)) for artifact in message.artifacts)
        _check_each(delivery, message.node_id, chains, chain, Fault.BAD_CHAIN)
    elif isinstance(message, GeneratedArtifacts):
        _require_same("encoding.k_dim", message.encoding.k_dim, terms.k_dim)
        vector = partial(vector_bytes, k_dim=message.encoding.k_dim)
        items = ((artifact["nonce"], artifact["vector_b64"]) for artifact in message.artifacts)
        _check_each(delivery, message.node_id, items, vector, Fault.BAD_VECTOR)
    else:
        distance = partial(_distance, r_target=terms.r_target or 0.0)
        pairs = zip(message.nonces, message.dist, strict=True)
        _check_each(delivery, message.node_id, pairs, distance, Fault.BAD_DISTANCE)
    return delivery


def require_same_round(terms: RoundTerms, message: Callback) -> None:
    """Raise Refusal unless the message names the block and the key of the round."""
    for name in ("public_key", "block_hash", "block_height"):
        _require_same(name, getattr(message, name), getattr(terms, name))


def require_networks_codebook(*, rebuilt: bool | None) -> None:
    """Raise Refusal for results of a ``rebuilt`` codebook: once stored, nothing would tell them from the network's."""
    if rebuilt:
        detail = (
            "rebuilt_codebook: the chains are of a codebook that is not the network's, and the round is of the "
            "network's: set VLLM_POC_DECODE_CODEBOOK of the pod to the network's file"
        )
        # About the sender: it need not search for the one result that is at fault.
        raise Refusal(HTTPStatus.FORBIDDEN, "RebuiltCodebook", detail)


def _require_same(name: str, value: object, expected: object) -> None:
    if value != expected:
        detail = f"{name} is {value}, but the round that this address is of has {expected}: deliver to its own"
        raise Refusal(HTTPStatus.BAD_REQUEST, "WrongRound", detail)


def parse(model: type[Message], body: bytes, most: int = MOST_VALUES) -> Message:
    """Return the message in ``body``; Refusal if it is none, or has more than ``most`` values."""
    require_few_values(body, most)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None


def _check_each(
    delivery: Delivery,
    node_id: int,
    items: Iterable[tuple[int, Item]],
    value: Callable[[Item], Value],
    fault: Fault,
) -> None:
    terms = delivery.known.terms
    slots, node_count, stride = delivery.known.slots, terms.node_count, terms.node_count * terms.n_groups
    if delivery.grant is not None:
        items = list(items)
        _require_granted(delivery.grant, stride, [nonce for nonce, _ in items])
    for nonce, item in items:
        offset = nonce % stride
        slot_id = slots.get(offset)
        if slot_id is None:
            delivery.refused.append(Refused(nonce, Fault.UNKNOWN_SLOT))
        elif offset % node_count != node_id:
            delivery.refused.append(Refused(nonce, Fault.WRONG_NODE))
        else:
            try:
                delivery.checked.append(CheckedArtifact(slot_id, nonce, value(item)))
            except ValueError:
                delivery.refused.append(Refused(nonce, fault))


def _require_granted(grant: Grant, stride: int, nonces: Sequence[int]) -> None:
    """Refuse the message as a whole: an honest pod sends none of these, or will send it again when clocks agree."""
    own, last = grant.slot, grant.slot + (grant.reach(time.time()) - 1) * stride
    for nonce in nonces:
        if nonce % stride != own or nonce > last:
            raise _beyond(grant, nonce, nonce % stride)


def _beyond(grant: Grant, nonce: int, offset: int) -> Refusal:
    pod = f"pod {grant.pod} ({grant.pod_uid}), which has slot {grant.slot}"
    if offset != grant.slot:
        detail = (
            f"nonce {nonce} is of slot {offset}, and the message is of {pod}: deliver the results of that slot alone"
        )
        return Refusal(HTTPStatus.FORBIDDEN, "OtherSlot", detail)
    detail = f"nonce {nonce} is further than the slot can be, says the time since the start; the message is of {pod}"
    remedy = "deliver it later, correct the clocks, or raise --max-nonces-per-second of the operator"
    return Refusal(HTTPStatus.TOO_EARLY, "BeyondReach", f"{detail}: {remedy}", headers={"Retry-After": "1"})


def _distance(value: float, r_target: float) -> float:
    if not 0 <= value < r_target:
        raise ValueError
    return value


class _Artifacts(GeneratedArtifacts):
    """Stops at the first bad entry: an error takes a hundred times the memory of what it is about."""

    artifacts: Annotated[list[Artifact], FailFast()]


class _Distances(GeneratedDistances):
    """Stops at the first bad entry of each list."""

    nonces: Annotated[list[Nonce], FailFast()]
    dist: Annotated[list[float], FailFast()]


#: One entry of each list, in their order.
_ARTIFACT = TypeAdapter(tuple[Artifact])
_DISTANCE = TypeAdapter(tuple[Nonce, float], config=ConfigDict(allow_inf_nan=False))


def parse_artifacts(body: bytes, most: int = MOST_VALUES) -> tuple[GeneratedArtifacts, list[Refused]]:
    """Return the message without the artifacts that cannot be read, and these; Refusal if it is none."""
    return _parse(_Artifacts, ("artifacts",), _ARTIFACT, body, most)


def parse_distances(body: bytes) -> tuple[GeneratedDistances, list[Refused]]:
    """Return the message without the nonces that cannot be read, or their distance; Refusal if it is none."""
    return _parse(_Distances, ("nonces", "dist"), _DISTANCE, body)


def require_few_values(body: bytes, most: int = MOST_VALUES) -> None:
    """Raise Refusal if the message has more values."""
    # Vectors, hashes and numbers have none of these characters, and every value but the first comes after one.
    if sum(map(body.count, (b",", b"[", b"{"))) > most:
        detail = f"the message has more than {most} values: send fewer results at once"
        raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BodyTooLarge", detail)


Entry = TypeAdapter[tuple[Artifact]] | TypeAdapter[tuple[Nonce, float]]


def _parse(
    model: type[Message], lists: Sequence[str], entry: Entry, body: bytes, most: int = MOST_VALUES
) -> tuple[Message, list[Refused]]:
    """Return the message, whose ``lists`` run parallel, without the entries that cannot be read."""
    require_few_values(body, most)
    try:
        message = model.model_validate_json(body)
    except ValidationError as error:
        places = [each["loc"] for each in error.errors(include_url=False, include_context=False, include_input=False)]
        if not all(place[1:] and place[0] in lists for place in places):
            raise _invalid(error) from None
    else:
        _require_parallel(lists, message.__dict__)
        return message, []
    raw: Any = from_json(body)
    _require_parallel(lists, raw)
    good, refused = _sieved(entry, zip(*(raw[name] for name in lists), strict=True))
    columns = {name: [one[place] for one in good] for place, name in enumerate(lists)}
    return model.model_validate(raw | columns), refused


def _sieved(entry: Entry, entries: Iterable[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], list[Refused]]:
    good, refused = list[tuple[Any, ...]](), list[Refused]()
    for one in entries:
        try:
            good.append(entry.validate_python(one))
        except ValidationError:
            refused.append(Refused(_nonce(one[0]), Fault.MALFORMED))
            if len(refused) > MOST_MALFORMED:
                detail = f"more than {MOST_MALFORMED} of the artifacts cannot be read: correct the sender"
                raise Refusal(HTTPStatus.BAD_REQUEST, "ArtifactsRefused", detail) from None
    return good, refused


def _require_parallel(lists: Sequence[str], raw: Mapping[str, Any]) -> None:
    if len({len(raw[name]) for name in lists}) > 1:
        detail = f"{' and '.join(lists)} differ in length: send one entry of each per nonce"
        raise Refusal(HTTPStatus.BAD_REQUEST, "InvalidRequest", detail)


def _nonce(entry: Any) -> int | None:  # noqa: ANN401 - any JSON
    nonce = entry.get("nonce") if isinstance(entry, dict) else entry
    return nonce if isinstance(nonce, int) and not isinstance(nonce, bool) else None


def _invalid(error: ValidationError) -> Refusal:
    entries = error.errors(include_url=False, include_context=False, include_input=False)
    return invalid(HTTPStatus.BAD_REQUEST, entries)
