# SPDX-License-Identifier: Apache-2.0
"""Forwards the artifacts of one round: one payload in flight, slots taking turns, each in the order of its nonces.

A payload is read when its post may begin, after every pause: what is disputed or has ended by then does not go out.
What a receiver has accepted is written down before the next payload goes out, and never sent again. A gateway that is
killed between the receiver's answer and that commit sends this one payload twice; receivers drop nonces they have.
"""

import asyncio
import logging
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

from poc_gateway import metrics
from poc_gateway.outbox import ledger
from poc_gateway.outbox.ledger import Part, SlotWork
from poc_gateway.outbox.pace import Backoff, CircuitBreaker, Pauses, Receivers, Trouble, newest_error, scope_of
from poc_gateway.outbox.post import NOTHING, Answer, Outcome, SecretPoster
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database, FenceLost
from poc_gateway.store.engine import DatabaseError
from poc_gateway.store.rounds import RoundTerms
from vllm_poc.logs import bound
from vllm_poc.wire.artifacts import Artifact, Encoding, chain_artifact
from vllm_poc.wire.callbacks import GeneratedArtifacts, GeneratedDistances
from vllm_poc.wire.messages import DEFAULT_K_DIM, Protocol

_log = logging.getLogger(__name__)

#: After so many single artifacts refused in a row the receiver is taken to refuse everything.
SEARCH_LIMIT = 64
#: Payloads that are not full wait this long, so that small deliveries become few posts.
LINGER_SECONDS = 0.5
#: Pause before a receiver's answer is written again that the database did not take.
RECORD_SECONDS = 1.0
#: Reads what a slot is to send next, of so many artifacts at most.
Find = Callable[[Connection, SlotWork, int], Part]


class Forwarder:
    """Sends what a round has to send, until nothing is left."""

    def __init__(
        self,
        round_id: int,
        terms: RoundTerms,
        *,
        receiver: str,
        poster: SecretPoster,
        receivers: Receivers,
        pauses: Pauses,
        database: Database,
        settings: Settings,
    ) -> None:
        self._round_id = round_id
        self._terms = terms
        self._url = url_of(receiver)
        self._poster = poster
        self._circuit: CircuitBreaker = receivers.circuit(self._url)
        self._database = database
        self._limit = settings.payload_artifacts
        self._backoff = Backoff(settings, scope_of(round_id), pauses)
        self._refused_in_a_row = 0
        self._settling = asyncio.Lock()
        self._is_halted = False

    @property
    def trouble(self) -> Trouble:
        """What keeps the round from being forwarded."""
        return Trouble(self.error, self.seconds_left)

    @property
    def error(self) -> str | None:
        """Why the last payload was not accepted; None if it was. An older reason of the round's own says little."""
        return newest_error((self._backoff, self._circuit.backoff))

    @property
    def seconds_left(self) -> float:
        """How long until the next try."""
        return max(self._backoff.seconds_left, self._circuit.backoff.seconds_left)

    async def run(self) -> None:
        """Forward everything there is; DatabaseError if it cannot be read."""
        with bound(round=self._terms.uid):
            while slots := await self._database.read(partial(ledger.slots_with_work, round_id=self._round_id)):
                full = [await self._turn(slot) for slot in slots]
                if not any(full):
                    await asyncio.sleep(LINGER_SECONDS)

    async def halt(self) -> None:
        """Begin no other post; return when the one on its way was answered, and the answer written down."""
        self._is_halted = True
        async with self._settling:
            pass

    async def _turn(self, slot: SlotWork) -> bool:
        """Send a payload of the slot's own, then one of its late items; return whether one of them was full."""
        sizes = [0]
        with bound(slot=slot.slot):
            if slot.is_behind:
                sizes.append(await self._send(ledger.next_in_order, slot))
                if not sizes[-1]:  # late items alone, which go out once the slot has passed them
                    await record(self._database, partial(ledger.pass_over, slot=slot), slot.slot_id)
            if slot.has_late:
                sizes.append(await self._send(ledger.next_late, slot))
        return max(sizes) == self._limit

    async def _send(self, find: Find, slot: SlotWork) -> int:
        """Send a payload, halved for as long as the receiver refuses it; return the largest size.

        After a failure what is left waits for the slot's next turn, so that one slot's trouble is not every slot's.
        """
        sizes = [self._limit if self._refused_in_a_row < SEARCH_LIMIT else 1]
        largest = 0
        await asyncio.sleep(self._backoff.seconds_left)
        while sizes:
            # Nothing is kept in memory between two posts: what was to be sent may be disputed by now.
            answer = await self._circuit.call(partial(self._settle, find, slot, sizes.pop()))
            largest = max(largest, answer.size)
            if answer.outcome is Outcome.NOTHING:
                break
            if answer.outcome is Outcome.FAILED or answer.pauses_address:
                await self._failed(answer)
                break
            if answer.outcome is Outcome.REFUSED and answer.size > 1:
                sizes += [answer.size - answer.size // 2, answer.size // 2]
            else:
                await self._backoff.succeeded()
        return largest

    async def _settle(self, find: Find, slot: SlotWork, limit: int) -> Answer:
        """Read a part, post it and write down what became of it."""
        async with self._settling:
            if self._is_halted:
                return NOTHING
            await self._poster.turn()
            part = await self._database.read(lambda connection: find(connection, slot, limit))
            if not part.items:
                return NOTHING
            return replace(await self._post(part), size=len(part.items))

    async def _post(self, part: Part) -> Answer:
        terms = self._terms
        body = _generated(terms, part)
        answer = await self._poster.post(self._url, body, namespace=terms.namespace, secret=terms.receiver_secret)
        if answer.outcome is Outcome.ACCEPTED:
            await record(self._database, lambda connection: ledger.accepted(connection, part), part.slot_id)
            metrics.FORWARDED.labels("artifact").inc(len(part.items))
            self._refused_in_a_row = 0
        elif answer.outcome is Outcome.REFUSED and len(part.items) == 1:
            return await self._refused(part, answer)
        return answer

    async def _refused(self, part: Part, answer: Answer) -> Answer:
        if self._refused_in_a_row >= SEARCH_LIMIT:
            reason = f"the receiver refuses everything, last with {answer.reason}"
            return replace(answer, outcome=Outcome.FAILED, reason=reason)
        self._refused_in_a_row += 1
        refused = partial(ledger.refused, part=part, reason=answer.reason)
        await record(self._database, refused, part.slot_id)
        metrics.DEAD.labels("artifact").inc()
        _log.warning("%s: nonce %d is refused for good: %s", self._name, part.items[0].nonce, answer.reason)
        return answer

    async def _failed(self, answer: Answer) -> None:
        if answer.outcome is Outcome.FAILED:  # the circuit counts the others
            await self._backoff.failed(answer)
        _log.warning("%s: forwarding failed, next try in %.1f s: %s", self._name, self.seconds_left, answer.reason)

    @property
    def _name(self) -> str:
        return f"round {self._terms.namespace}/{self._terms.name}"


def url_of(receiver: str) -> str:
    """Return where a receiver takes artifacts."""
    return f"{receiver.rstrip('/')}/generated"


async def record(database: Database, work: Callable[[Connection], object], slot_id: int = 0) -> None:
    """Write what a receiver has answered, however often the database fails: to forget it would be to post again."""
    while True:
        try:
            await database.write(work, slot_id=slot_id)
        except FenceLost:  # for ever: the next owner sends it again
            raise
        except DatabaseError as error:
            _log.warning("a receiver's answer cannot be written down yet: %s", error)
            await asyncio.sleep(RECORD_SECONDS)
        else:
            return


def _generated(terms: RoundTerms, part: Part) -> str:
    """Return the JSON of ``/generated`` for a part, as a pod would have sent it."""
    payload = _distances(terms, part) if terms.protocol is Protocol.DISTANCE else _artifacts(terms, part)
    return payload.model_dump_json(exclude_none=True)


def _artifacts(terms: RoundTerms, part: Part) -> GeneratedArtifacts:
    values = [(item.nonce, item.vector) for item in part.items if item.vector is not None]
    artifact = chain_artifact if terms.protocol is Protocol.DECODE else _vector_artifact
    return GeneratedArtifacts(
        public_key=terms.public_key,
        block_hash=terms.block_hash,
        block_height=terms.block_height,
        node_id=part.node_id,
        artifacts=[artifact(nonce, value) for nonce, value in values],
        encoding=Encoding(k_dim=terms.k_dim or DEFAULT_K_DIM),
    )


def _vector_artifact(nonce: int, vector: bytes) -> Artifact:
    return Artifact(nonce=nonce, vector_b64=b64encode(vector).decode())


def _distances(terms: RoundTerms, part: Part) -> GeneratedDistances:
    assert terms.r_target is not None  # noqa: S101 - the distance protocol has it
    distances = [(item.nonce, item.distance) for item in part.items if item.distance is not None]
    return GeneratedDistances(
        public_key=terms.public_key,
        block_hash=terms.block_hash,
        block_height=terms.block_height,
        node_id=part.node_id,
        nonces=[nonce for nonce, _ in distances],
        dist=[distance for _, distance in distances],
        r_target=terms.r_target,
    )
