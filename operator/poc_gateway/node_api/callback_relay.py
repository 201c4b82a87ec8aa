# SPDX-License-Identifier: Apache-2.0
"""Callbacks that the network's client hands to the ML node, to be passed on to their receiver.

The network's own ML node passes on whatever comes this way. Here results are what pods deliver with their credentials,
and the ledger sends them. So only what the ledger has is relayed, and neither what it holds back nor what it gave up.
A caller can let it be sent once more, and can make nothing up.
"""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from sqlalchemy import Connection

from poc_gateway.errors import Refusal
from poc_gateway.ingest.deliveries import (
    MOST_VALUES,
    Delivery,
    Generated,
    check_generated,
    most_values,
    parse,
    parse_generated,
    require_few_values,
)
from poc_gateway.ingest.storing import stored_values
from poc_gateway.node_api.create_pocround import NetworkRounds
from poc_gateway.node_api.jobs import Jobs
from poc_gateway.outbox import callback_ledger, listing
from poc_gateway.outbox.post import Answer, Outcome, Poster
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.rounds import KnownRound, load
from poc_operator.apis.v1alpha1.round import PoCRound
from vllm_poc.wire.artifacts import Artifact, chain_artifact
from vllm_poc.wire.callbacks import Callback, GeneratedArtifacts, GeneratedDistances
from vllm_poc.wire.messages import Protocol

GENERATED, VALIDATED = "generated", "validated"
#: A receiver is waited for no longer: proxies, and the network's, wait for 60 s.
RELAY_SECONDS = 50.0
#: Callbacks that a process relays at once: each takes room for its body for as long as its receiver hangs.
MOST_AT_ONCE = 4
_TOKEN_CHARACTERS = 32


class Found(NamedTuple):
    """Where a callback goes, the rounds of the ML node that it may be of, and which jobs are the ML node's.

    ``results`` are what it holds, read in the way of each protocol that these rounds have, if it can be.
    """

    target: str
    uids: Sequence[str]
    results: Mapping[Protocol, Generated]
    has_job: Callable[[str], bool]


class _Places:
    """The relays under way in this process, of all its ML nodes."""

    def __init__(self) -> None:
        self._taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take a place for as long as the context lasts; Refusal if there is none."""
        if self._taken >= MOST_AT_ONCE:
            detail = f"{MOST_AT_ONCE} callbacks are being relayed, and no more are at once: send it again in a moment"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, "TooManyRelays", detail, headers={"Retry-After": "10"})
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


_PLACES = _Places()


class CallbackRelay:
    """Sends what the ledger has of an ML node's callbacks."""

    def __init__(self, database: Database, settings: Settings, rounds: NetworkRounds, jobs: Jobs) -> None:
        self._database = database
        self._settings = settings
        self._rounds = rounds
        self._jobs = jobs
        self._poster: Poster | None = None

    async def close(self) -> None:
        """Close the connections to receivers."""
        if self._poster is not None:
            await self._poster.close()

    async def send(self, token: str, suffix: str, body: bytes) -> int:
        """Post the callback to the address that ``token`` stands for; return its receiver's status.

        Refusal if the callback is not sent or not accepted. StoreError if the API server cannot be asked, DatabaseError
        if the ledger cannot be read.
        """
        if suffix not in {GENERATED, VALIDATED}:
            detail = f"there is no callback /{suffix}: relay /{GENERATED} or /{VALIDATED}"
            raise Refusal(HTTPStatus.NOT_FOUND, "CallbackUnknown", detail)
        with _PLACES.one():
            return await self._send(token, suffix, body)

    async def _send(self, token: str, suffix: str, body: bytes) -> int:
        # Of which scheme it is only its round tells, and chains have the most values.
        about = parse(Callback, body, most_values(Protocol.DECODE))
        rounds = await self._rounds.all()
        receivers = {round_.spec.callback_url for round_ in rounds if round_.spec.callback_url}
        receivers |= await self._jobs.receivers()
        url = next((one for one in receivers if token.lower() in tokens_of(one)), None)
        if url is None:
            detail = (
                f"no round and no request of this ML node names a callback address with the token {token}, which is "
                f"the first {_TOKEN_CHARACTERS} hex digits of the SHA-256 of the address: correct one of them"
            )
            raise Refusal(HTTPStatus.NOT_FOUND, "CallbackUnknown", detail)
        # The network has one address for all its rounds.
        same = [round_ for round_ in rounds if round_.spec.callback_url == url and _is_about(round_, about)]
        protocols = {round_.spec.protocol for round_ in same} if suffix == GENERATED else set[Protocol]()
        require_few_values(body, max(map(most_values, protocols), default=MOST_VALUES))
        results = _results(protocols, body)
        found = Found(f"{url}/{suffix}", [round_.id for round_ in same], results, self._jobs.has)
        content = await self._database.read(partial(_content, found=found, text=body.decode()))
        return _status_of(await self._post(found.target, content))

    async def _post(self, target: str, content: str) -> Answer:
        self._poster = self._poster or Poster(self._settings)
        try:
            async with asyncio.timeout(RELAY_SECONDS):
                return await self._poster.post(target, content)
        except TimeoutError:
            return Answer(Outcome.BUSY, f"no answer within {RELAY_SECONDS:g} s")


def tokens_of(url: str) -> Collection[str]:
    """Return what stands for a callback address, which the network may have written with a slash at its end."""
    written = (url, f"{url}/")
    return [hashlib.sha256(text.encode()).hexdigest()[:_TOKEN_CHARACTERS] for text in written]


def _is_about(round_: PoCRound, message: Callback) -> bool:
    spec = round_.spec
    of_round = (spec.public_key, spec.block_hash, spec.block_height)
    return of_round == (message.public_key, message.block_hash, message.block_height)


def _results(protocols: Collection[Protocol], body: bytes) -> Mapping[Protocol, Generated]:
    results = dict[Protocol, Generated]()
    for protocol in protocols:
        with suppress(Refusal):  # it is of the other one, or of neither
            results[protocol] = parse_generated(protocol, body)
    return results


def _content(connection: Connection, found: Found, text: str) -> str:
    """Return what is sent, as the ledger has it. Refusal if it has not, or does not send it."""
    senders = callback_ledger.senders_of(connection, found.target, text)
    if any(uid in found.uids or (job_id is not None and found.has_job(job_id)) for uid, job_id in senders):
        return text
    if (content := _of_rounds(connection, found)) is not None:
        return content
    detail = (
        "the gateway does not have this from pods of this ML node: pods deliver to the address that the operator gives "
        "them, with their credential, and the gateway sends on what it has stored"
    )
    raise Refusal(HTTPStatus.FORBIDDEN, "NotDelivered", detail)


def _of_rounds(connection: Connection, found: Found) -> str | None:
    """Return the results as a round sends them that has them; None if none has. Refusal if each holds some back."""
    held: Refusal | None = None
    for uid in found.uids if found.results else ():
        known = load(connection, uid)
        results = None if known is None else found.results.get(known.terms.protocol)
        if known is None or results is None or (delivery := _delivery(connection, known, results)) is None:
            continue
        try:
            _require_sent(connection, delivery)
        except Refusal as refusal:  # a round that was stopped may have been asked for anew
            held = held or refusal
        else:
            return _rewritten(known, results)
    if held is not None:
        raise held
    return None


def _delivery(connection: Connection, known: KnownRound, results: Generated) -> Delivery | None:
    """Return the results, if they are some of the round's and its pods have delivered all of them."""
    try:
        delivery = check_generated(known, results)
    except Refusal:  # of another length
        return None
    keys = {(found.slot_id, found.nonce) for found in delivery.checked}
    # Each nonce once, as the ledger sends it.
    if not keys or delivery.refused or len(keys) != len(delivery.checked):
        return None
    values = stored_values(connection, keys)
    same = all(values.get((found.slot_id, found.nonce)) == found.value for found in delivery.checked)
    return delivery if same else None


def _require_sent(connection: Connection, delivery: Delivery) -> None:
    for slot_id in {found.slot_id for found in delivery.checked}:
        nonces = [found.nonce for found in delivery.checked if found.slot_id == slot_id]
        if (state := listing.unsent(connection, slot_id, nonces)) is not None:
            detail = (
                f"some of these results are {state} and are not sent: GET /rounds/NS/NAME/ledger?state={state} of the "
                "gateway's other port lists them, with the reason"
            )
            raise Refusal(HTTPStatus.CONFLICT, "HeldBack", detail)


def _rewritten(known: KnownRound, results: Generated) -> str:
    # As it was read, since another parser may see more in it: two keys that differ in case are one for Go. What was not
    # compared with the ledger is as the ledger sends it.
    own: dict[str, object] = {"request_id": None}
    if isinstance(results.message, GeneratedDistances):
        own["r_target"] = known.terms.r_target
    if isinstance(results.message, GeneratedArtifacts):
        is_chain = known.terms.protocol is Protocol.DECODE
        own["artifacts"] = [(_chain if is_chain else _vector)(artifact) for artifact in results.message.artifacts]
    return results.message.model_copy(update=own).model_dump_json(exclude_none=True)


def _chain(artifact: Artifact) -> Artifact:
    return chain_artifact(artifact["nonce"], bytes(artifact.get("k_points_steps") or ()))


def _vector(artifact: Artifact) -> Artifact:
    return Artifact(nonce=artifact["nonce"], vector_b64=artifact["vector_b64"])


def _status_of(answer: Answer) -> int:
    """Return the receiver's status if it accepted the callback; else raise it as a Refusal."""
    if answer.outcome is Outcome.ACCEPTED and answer.status is not None:
        return answer.status
    if answer.status is not None and answer.status >= HTTPStatus.BAD_REQUEST:
        detail = f"the receiver did not accept the callback: {answer.reason}"
        raise Refusal(_known_status(answer.status), "ReceiverRefused", detail)
    detail = f"the receiver was not reached: {answer.reason}"
    raise Refusal(HTTPStatus.BAD_GATEWAY, "ReceiverUnreachable", detail)


def _known_status(status: int) -> HTTPStatus:
    try:
        return HTTPStatus(status)
    except ValueError:
        return HTTPStatus.BAD_GATEWAY
