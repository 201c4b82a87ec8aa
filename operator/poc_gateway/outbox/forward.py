# SPDX-License-Identifier: Apache-2.0
"""Forwards what is stored: a task for each round and for each callback address that has something to send.

A round has one payload in flight, slots taking turns, in each slot in the order of nonces. Callbacks of one address
go out in the order they were written; one that fails does not hold up those behind it.

What a receiver has accepted is written down before the next payload goes out, and never sent again. A gateway that is
killed between the receiver's answer and that commit sends this one payload twice; receivers drop nonces they have.
"""

import asyncio
import contextlib
import logging
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

from poc_gateway import metrics
from poc_gateway.outbox import ledger
from poc_gateway.outbox.ledger import Part, SlotWork
from poc_gateway.outbox.pace import Backoff, CircuitBreaker, Receivers
from poc_gateway.outbox.post import Answer, Outcome, Poster
from poc_gateway.settings import Settings
from poc_gateway.store.database import Database
from poc_gateway.store.engine import DatabaseError
from poc_gateway.store.rounds import RoundTerms
from vllm_poc.logs import bound
from vllm_poc.wire.artifacts import Artifact, Encoding
from vllm_poc.wire.callbacks import GeneratedArtifacts, GeneratedDistances
from vllm_poc.wire.messages import Protocol

_log = logging.getLogger(__name__)

#: After so many single artifacts refused in a row the receiver is taken to refuse everything.
SEARCH_LIMIT = 64
#: Payloads that are not full wait this long, so that small deliveries become few posts.
LINGER_SECONDS = 0.5
#: Seconds between two looks for work, and between two at callbacks that wait for their next try.
POLL_SECONDS = 1.0
#: Pause before a receiver's answer is written again that the database did not take.
RECORD_SECONDS = 1.0


class Forwarder:
    """Sends what a round has to send, until nothing is left."""

    def __init__(
        self,
        round_id: int,
        terms: RoundTerms,
        *,
        receiver: str,
        poster: Poster,
        circuit: CircuitBreaker,
        database: Database,
        settings: Settings,
    ) -> None:
        self._round_id = round_id
        self._terms = terms
        self._url = f"{receiver.rstrip('/')}/generated"
        self._poster = poster
        self._circuit = circuit
        self._database = database
        self._limit = settings.payload_artifacts
        self._backoff = Backoff(settings)
        self._refused_in_a_row = 0

    @property
    def error(self) -> str | None:
        """Why the last payload was not accepted; None if it was."""
        return self._backoff.error or self._circuit.backoff.error

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

    async def _turn(self, slot: SlotWork) -> bool:
        """Send a payload of the slot's own, then one of its late items; return whether one of them was full."""
        sizes = [0]
        with bound(slot=slot.slot):
            if slot.is_behind:
                sizes.append(await self._send(ledger.next_in_order, slot))
            if slot.has_late:
                sizes.append(await self._send(ledger.next_late, slot))
        return max(sizes) == self._limit

    async def _send(self, find: Callable[[Connection, SlotWork, int], Part], slot: SlotWork) -> int:
        """Send a payload, halved for as long as the receiver refuses it; return its size.

        After a failure what is left waits for the slot's next turn, so that one slot's trouble is not every slot's.
        """
        limit = self._limit if self._refused_in_a_row < SEARCH_LIMIT else 1
        whole = await self._database.read(lambda connection: find(connection, slot, limit))
        parts = [whole] if whole.items else []
        while parts:
            part = parts.pop()
            await asyncio.sleep(self._backoff.seconds_left)
            answer = await self._circuit.call(partial(self._settle, part))
            if answer.outcome in {Outcome.FAILED, Outcome.UNREACHABLE}:
                self._failed(answer)
                break
            if answer.outcome is Outcome.REFUSED and len(part.items) > 1:
                parts += reversed(part.halves())
            else:
                self._backoff.succeeded()
        return len(whole.items)

    async def _settle(self, part: Part) -> Answer:
        """Post the part and write down what became of it."""
        answer = await self._poster.post(self._url, _generated(self._terms, part))
        if answer.outcome is Outcome.ACCEPTED:
            await _record(self._database, lambda connection: ledger.accepted(connection, part))
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
        await _record(self._database, lambda connection: ledger.refused(connection, part, answer.reason))
        metrics.DEAD.labels("artifact").inc()
        _log.warning("%s: nonce %d is refused for good: %s", self._name, part.items[0].nonce, answer.reason)
        return answer

    def _failed(self, answer: Answer) -> None:
        if answer.outcome is Outcome.FAILED:  # the circuit counts the others
            self._backoff.failed(answer)
        _log.warning("%s: forwarding failed, next try in %.1f s: %s", self._name, self.seconds_left, answer.reason)

    @property
    def _name(self) -> str:
        return f"round {self._terms.namespace}/{self._terms.name}"


class CallbackSender:
    """Sends the callbacks for one address, verdicts and results of jobs, until none waits.

    One that fails does not hold up the others: the network's receiver answers 503 for ever to a verdict that is too
    late, and the next one is a vote all the same.
    """

    def __init__(
        self, url: str, *, poster: Poster, circuit: CircuitBreaker, database: Database, settings: Settings
    ) -> None:
        self._url = url
        self._poster = poster
        self._circuit = circuit
        self._database = database
        self._settings = settings
        self._failing: dict[int, Backoff] = {}

    async def run(self) -> None:
        """Send everything there is; DatabaseError if it cannot be read."""
        while waiting := await self._database.read(partial(ledger.waiting_callbacks, url=self._url)):
            self._failing = {id_: self._failing[id_] for id_ in waiting if id_ in self._failing}
            for id_ in waiting:
                if id_ not in self._failing or not self._failing[id_].seconds_left:
                    await self._send(id_)
            if self._failing:
                await asyncio.sleep(POLL_SECONDS)

    async def _send(self, id_: int) -> None:
        body = await self._database.read(partial(ledger.callback_body, id_=id_))
        if body is None:  # deleted with its round or job
            return
        answer = await self._circuit.call(partial(self._settle, id_, body))
        while answer.outcome is Outcome.UNREACHABLE:  # so would be all others: the order is kept
            answer = await self._circuit.call(partial(self._settle, id_, body))
        if answer.outcome is Outcome.FAILED:
            self._failing.setdefault(id_, Backoff(self._settings)).failed(answer)
            _log.warning("callback %d failed, and is tried again: %s", id_, answer.reason)
        else:
            self._failing.pop(id_, None)

    async def _settle(self, id_: int, body: str) -> Answer:
        """Post the callback and write down what became of it."""
        answer = await self._poster.post(self._url, body)
        if answer.outcome is Outcome.ACCEPTED:
            await _record(self._database, partial(ledger.callback_settled, id_=id_, refusal=None))
            metrics.FORWARDED.labels("callback").inc()
        elif answer.outcome is Outcome.REFUSED:
            await _record(self._database, partial(ledger.callback_settled, id_=id_, refusal=answer.reason))
            metrics.DEAD.labels("callback").inc()
            _log.error("callback %d is refused for good: %s", id_, answer.reason)
        return answer


class Outbox:
    """One per process. Everything to be sent is in the database, so it goes on where another one ended."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._receivers = Receivers(settings)
        self._woken = asyncio.Event()
        self._forwarders: dict[int, Forwarder] = {}
        self._senders: dict[str, CallbackSender] = {}

    def wake(self) -> None:
        """Look for work soon: something was stored. To be called from the event loop."""
        self._woken.set()

    def forwarder(self, round_id: int) -> Forwarder | None:
        """Return what forwards the round at the moment; None if nothing is left to send."""
        return self._forwarders.get(round_id)

    async def run(self) -> None:
        """Send until cancelled; then posts in flight are finished, for which the database must still be open."""
        async with Poster(self._settings) as poster, asyncio.TaskGroup() as tasks:
            while True:
                try:
                    await self._start_senders(tasks, poster)
                except DatabaseError as error:
                    _log.warning("what is to be forwarded cannot be read yet: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), POLL_SECONDS)
                    await asyncio.sleep(LINGER_SECONDS)
                self._woken.clear()

    async def _start_senders(self, tasks: asyncio.TaskGroup, poster: Poster) -> None:
        for round_id in await self._database.read(ledger.rounds_with_work):
            if round_id not in self._forwarders:
                await self._start_forwarder(tasks, poster, round_id)
        for url in await self._database.read(ledger.addresses_with_callbacks):
            if url not in self._senders:
                self._senders[url] = CallbackSender(
                    url,
                    poster=poster,
                    circuit=self._receivers.circuit(url),
                    database=self._database,
                    settings=self._settings,
                )
                tasks.create_task(_logged(self._senders[url].run, partial(self._senders.pop, url)))

    async def _start_forwarder(self, tasks: asyncio.TaskGroup, poster: Poster, round_id: int) -> None:
        terms = await self._database.read(partial(ledger.terms, round_id=round_id))
        if terms is None or terms.receiver is None:  # deleted meanwhile
            return
        self._forwarders[round_id] = Forwarder(
            round_id,
            terms,
            receiver=terms.receiver,
            poster=poster,
            circuit=self._receivers.circuit(terms.receiver),
            database=self._database,
            settings=self._settings,
        )
        tasks.create_task(_logged(self._forwarders[round_id].run, partial(self._forwarders.pop, round_id)))


async def _record(database: Database, work: Callable[[Connection], None]) -> None:
    """Write what a receiver has answered, however often the database fails: to forget it would be to post again."""
    while True:
        try:
            return await database.write(work)
        except DatabaseError as error:
            _log.warning("a receiver's answer cannot be written down yet: %s", error)
            await asyncio.sleep(RECORD_SECONDS)


async def _logged(run: Callable[[], Awaitable[None]], ended: Callable[[], object]) -> None:
    # One round's fault must not end the others': it is found again at the next poll.
    try:
        await run()
    except DatabaseError as error:
        _log.warning("what is to be forwarded cannot be read yet: %s", error)
    except Exception:
        _log.exception("forwarding failed, and is tried again")
    finally:
        ended()


def _generated(terms: RoundTerms, part: Part) -> str:
    """Return the JSON of ``/generated`` for a part, as a pod would have sent it."""
    payload = _artifacts(terms, part) if terms.protocol is Protocol.ARTIFACT else _distances(terms, part)
    return payload.model_dump_json(exclude_none=True)


def _artifacts(terms: RoundTerms, part: Part) -> GeneratedArtifacts:
    assert terms.k_dim is not None  # noqa: S101 - the artifact protocol has it
    vectors = [(item.nonce, item.vector) for item in part.items if item.vector is not None]
    return GeneratedArtifacts(
        public_key=terms.public_key,
        block_hash=terms.block_hash,
        block_height=terms.block_height,
        node_id=part.node_id,
        artifacts=[Artifact(nonce=nonce, vector_b64=b64encode(vector).decode()) for nonce, vector in vectors],
        encoding=Encoding(k_dim=terms.k_dim),
    )


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
