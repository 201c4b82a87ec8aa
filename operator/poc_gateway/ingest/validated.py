# SPDX-License-Identifier: Apache-2.0
"""Verdicts that pods deliver: each pod's about a batch of nonces is taken once, and not without bound.

What a batch is, the message says: by the id of its request, or by its nonces; older pods name neither, and then the
whole message stands for it.
"""

import hashlib
from http import HTTPStatus
from typing import Annotated, NamedTuple

from pydantic import Field
from sqlalchemy import Connection, func, insert, select

from poc_gateway.errors import Refusal
from poc_gateway.ingest.deliveries import parse, require_networks_codebook, require_same_round
from poc_gateway.outbox import callback_ledger
from poc_gateway.store.rounds import KnownRound, RoundTerms
from poc_gateway.store.schema import authors, verdicts
from vllm_poc.wire.callbacks import Callback
from vllm_poc.wire.messages import Nonce

#: Largest verdict: ten thousand nonces with their distances fit in.
MOST_BYTES = 2**20
#: Verdicts of one pod about one round, and their size together.
MOST_VERDICTS = 1_000
MOST_TOTAL_BYTES = 16 * 2**20
#: Stands for the pod where the gateway asks for no credentials.
UNKNOWN_AUTHOR = 0


class _Validated(Callback):
    """What tells one verdict from another. The rest is for the receiver to judge."""

    request_id: Annotated[str, Field(max_length=256)] | None = None
    nonces: list[Nonce] | None = None
    rebuilt_codebook: bool = False


class Verdict(NamedTuple):
    """A message, and hashes of the batch that it is about and of all of it."""

    text: str
    batch: str
    digest: str


def read_verdict(terms: RoundTerms, body: bytes) -> Verdict:
    """Read a ``/validated`` message; Refusal if it is too large, of another round or codebook, or cannot be read."""
    if len(body) > MOST_BYTES:
        detail = f"the verdict has {len(body)} bytes, and at most {MOST_BYTES} are taken: validate fewer nonces at once"
        raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "BodyTooLarge", detail)
    message = parse(_Validated, body)
    require_same_round(terms, message)
    require_networks_codebook(rebuilt=message.rebuilt_codebook)
    digest = hashlib.sha256(body).hexdigest()
    return Verdict(body.decode(), _batch(message, digest), digest)


def _batch(message: _Validated, digest: str) -> str:
    if message.request_id is not None:
        return hashlib.sha256(f"request {message.request_id}".encode()).hexdigest()
    if message.nonces is not None:
        return hashlib.sha256(f"nonces {sorted(message.nonces)}".encode()).hexdigest()
    return digest


def add_verdict(known: KnownRound, author: int, verdict: Verdict, connection: Connection) -> bool | Refusal:
    """Take a verdict, to be passed on if there is a receiver; a repeated one changes nothing.

    Return False if the round is deleted or being deleted, and the Refusal if the pod has told another verdict about the
    batch, which stays, or too many about the round. None is raised: that would undo what others write beside it.
    """
    # What the pod sends to another process at the same time is counted, too.
    connection.execute(select(authors.c.id).where(authors.c.id == author).with_for_update(key_share=True))
    mine = (verdicts.c.round_id == known.id) & (verdicts.c.author == author)
    told = connection.scalar(select(verdicts.c.digest).where(mine, verdicts.c.batch == verdict.batch))
    if told is not None:
        if told != verdict.digest:
            detail = "another verdict of this pod about the same nonces is stored, and stays: send each once"
            return Refusal(HTTPStatus.CONFLICT, "VerdictConflict", detail)
        return True
    size = len(verdict.text.encode())
    sums = select(func.count(), func.coalesce(func.sum(verdicts.c.bytes), 0)).where(mine)
    count, total = connection.execute(sums).one()
    if count >= MOST_VERDICTS or int(total) + size > MOST_TOTAL_BYTES:
        detail = (
            f"this pod has {count} verdicts of {total} bytes stored for the round, and at most {MOST_VERDICTS} of "
            f"{MOST_TOTAL_BYTES} bytes are taken: validate more nonces at once, or begin another round"
        )
        return Refusal(HTTPStatus.CONFLICT, "TooManyVerdicts", detail)
    if not callback_ledger.add_verdict(connection, known.id, known.terms.receiver, verdict.text):
        return False
    key = {"round_id": known.id, "author": author, "batch": verdict.batch}
    connection.execute(insert(verdicts).values(key | {"digest": verdict.digest, "bytes": size}))
    return True
