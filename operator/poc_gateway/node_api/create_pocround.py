# SPDX-License-Identifier: Apache-2.0
"""The rounds of an ML node: one at a time, each a PoCRound made from the template and what the request brings.

The template has ``namespace`` and ``spec``, the start of a PoCRound's; the request brings block, key, node id, model,
protocol and receiver. Nothing is remembered here: which round is active, the API server is asked each time.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from http import HTTPStatus
from time import monotonic
from typing import Any

from poc_gateway.errors import Refusal, field_refusal, fields_refusal
from poc_gateway.node_api.cluster import Cluster
from poc_gateway.node_api.ml_nodes import MlNode
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import State
from poc_operator.clients.errors import ObjectInvalid, StaleObject
from vllm_poc.wire.answers import FieldError
from vllm_poc.wire.messages import InitGenerateRequest

#: An operator that runs has looked at a round well before.
UNSEEN_SECONDS = 10.0
#: So long a stop waits for the results to be flushed, and how often it looks. The network begins its next round within
#: seconds of the stop, and a pod that is hung may take much longer to be given up.
STOP_SECONDS = 3.0
_LOOK_SECONDS = 0.5


class NetworkRounds:
    """The rounds that carry the ML node's labels. If they are ``shared``, other processes start some, too."""

    def __init__(
        self, cluster: Cluster, ml_node: MlNode, *, stop_seconds: float = STOP_SECONDS, shared: bool = False
    ) -> None:
        self._is_shared = shared
        self._cluster = cluster
        self._ml_node = ml_node
        self._stop_seconds = stop_seconds
        self._starting = asyncio.Lock()

    async def active(self) -> PoCRound | None:
        """Return the newest round that is not over. StoreError if the API server cannot be asked."""
        return next(iter(_active(await self._cluster.list_rounds())), None)

    async def all(self) -> Sequence[PoCRound]:
        """Return all rounds, also those that are over. StoreError if the API server cannot be asked."""
        return await self._cluster.list_rounds()

    async def start(self, request: InitGenerateRequest, model: str) -> PoCRound:
        """Create the round, unless it runs already; refused with 409 while another one runs that was not told to end.

        One that ends holds nobody up: each pod begins the new one when it has put down the old one's work.
        """
        self._check_number(request)
        asked = asked_of(request, model)
        wanted = name_of(self._ml_node.name, asked)
        async with self._starting:
            rounds = await self._cluster.list_rounds()
            running = next((round_ for round_ in _active(rounds) if not _ends(round_)), None)
            if running is not None:
                return _same(running, wanted)
            name = _free_name(wanted, rounds)
            try:
                made = await self._cluster.create(name, self._ml_node.template.spec_of(asked))
                return await self._first(made, wanted) if self._is_shared else made
            except ObjectInvalid as error:
                raise _refused(error, request) from error
            except StaleObject:
                # Another process may have been asked for the same at the same time.
                rounds = await self._cluster.list_rounds() if self._is_shared else []
                if (same := next((one for one in _active(rounds) if one.metadata.name == name), None)) is not None:
                    return same
                detail = (
                    f"there is a PoCRound {name} that is not labelled as this ML node's, or cannot be read: delete it"
                )
                raise Refusal(HTTPStatus.CONFLICT, "RoundConflict", detail) from None

    async def _first(self, made: PoCRound, wanted: str) -> PoCRound:
        """Return the round that was made if no other process has made one before; else end it, and refuse as above.

        Each process looks after it has made its own, so that of two at the same time at least one sees both. Moments
        have seconds: of two in the same one neither was first for sure, and both may be refused.
        """
        others = [one for one in _active(await self._cluster.list_rounds()) if not _ends(one) and one.id != made.id]
        moment = made.metadata.creation_timestamp
        before = [one for one in others if one.metadata.creation_timestamp <= moment]
        if not before:
            return made
        await self._cluster.finish(made.metadata.name)
        return _same(before[-1], wanted)

    async def stop(self) -> Sequence[PoCRound]:
        """End what is active and wait until its results are flushed; return the rounds that have yet to end.

        Pods that do not answer are not waited for: the operator does, for as long as they may compute.
        """
        rounds = _active(await self._cluster.list_rounds())
        for round_ in rounds:
            await self._cluster.finish(round_.metadata.name)
        ending = {round_.id for round_ in rounds}
        deadline = monotonic() + self._stop_seconds
        while any(map(_is_flushing, rounds)) and monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
            rounds = [round_ for round_ in _active(await self._cluster.list_rounds()) if round_.id in ending]
        return rounds

    def _check_number(self, request: InitGenerateRequest) -> None:
        number = self._ml_node.number
        if number is not None and request.node_id != number:
            message = f"{request.node_id} was sent to ML node {self._ml_node.name}, which is number {number}: "
            raise field_refusal("node_id", message + "correct the network node's base URL, or gateway.mlNodes")


def waits_for_operator(round_: PoCRound) -> str | None:
    """Say so if no operator has looked at the round for a while."""
    age = (datetime.now(UTC) - round_.metadata.creation_timestamp).total_seconds()
    if round_.status.observed_generation or age <= UNSEEN_SECONDS:
        return None
    return f"the operator has not picked up round {round_.metadata.name} yet: look whether it runs"


def _active(rounds: Sequence[PoCRound]) -> list[PoCRound]:
    found = [round_ for round_ in rounds if not round_.status.state.finished]
    return sorted(found, key=lambda round_: round_.metadata.creation_timestamp, reverse=True)


def _ends(round_: PoCRound) -> bool:
    ends = round_.spec.finish or round_.status.state is State.STOPPING
    return ends or round_.metadata.deletion_timestamp is not None


def _is_flushing(round_: PoCRound) -> bool:
    """Whether a pod that answers may still deliver results of a round that was told to end, for all that is known."""
    if round_.status.observed_generation < round_.metadata.generation:
        return True
    left = [slot for slot in round_.status.assignments if slot.state.active]
    return not left or any(slot.error is None for slot in left)


def _same(running: PoCRound, name: str) -> PoCRound:
    if _content(running) == name:
        return running
    state = f"is {running.status.state}, stop it first"
    detail = f"Already generating: round {running.metadata.name} at height {running.spec.block_height} {state}"
    raise Refusal(HTTPStatus.CONFLICT, "RoundConflict", detail)


def _content(round_: PoCRound) -> str:
    return "-".join(round_.metadata.name.split("-")[:3])


def _free_name(name: str, rounds: Sequence[PoCRound]) -> str:
    """Return the name, numbered if rounds of the same content have ended: they were stopped, and are asked for anew."""
    taken = {round_.metadata.name for round_ in rounds}
    attempts = (f"{name}-{number}" if number > 1 else name for number in range(1, len(taken) + 2))
    return next(attempt for attempt in attempts if attempt not in taken)


def _refused(error: ObjectInvalid, request: InitGenerateRequest) -> Refusal:
    """Return what the API server says of the spec, in the request's words. What it does not name is of no field."""
    told = dict[str, str]()
    for path, message in error.fields or [("", str(error))]:
        told.setdefault(_field_of(path, request), message.replace(f"{path} in body ", ""))
    return fields_refusal([FieldError(field=field, message=message) for field, message in told.items()])


def _field_of(path: str, request: InitGenerateRequest) -> str:
    """Return the field of the request that decides this one of the spec; a field of the template keeps its path."""
    decided = {
        "spec.blockHash": "block_hash",
        "spec.blockHeight": "block_height",
        "spec.publicKey": "public_key",
        "spec.nodes.first": "node_id",
        "spec.nodes.last": "node_id",
        "spec.nodes.count": "node_count",
        "spec.model.seqLen": "seq_len" if request.params is None else "params.seq_len",
        "spec.model.strongRng": "poc_stronger_rng",
        "spec.decode.maxTokens": "params.max_tokens",
        "spec.artifact.kDim": "params.k_dim",
        "spec.rTarget": "r_target",
        "spec.callbackURL": "callback_url" if request.url is None else "url",
    }
    if "batch_size" in request.model_fields_set:
        decided["spec.batchSize"] = "batch_size"
    return decided.get(path, path)


def asked_of(request: InitGenerateRequest, model: str) -> dict[str, Any]:
    """Return the part of the spec that the request decides."""
    node = request.node_id
    asked: dict[str, Any] = {
        "blockHash": request.block_hash,
        "blockHeight": request.block_height,
        "publicKey": request.public_key,
        "nodes": {"first": node, "last": node, "count": request.node_count},
        "model": {"name": model, "seqLen": request.effective_seq_len, "strongRng": request.poc_stronger_rng},
    }
    if request.params is not None and request.params.decodes:
        asked["decode"] = {"maxTokens": request.params.max_tokens}
    elif request.params is not None:
        asked["artifact"] = {"kDim": request.params.k_dim}
    else:
        asked["rTarget"] = format(Decimal(repr(request.r_target)), "f")
    if "batch_size" in request.model_fields_set:
        asked["batchSize"] = request.batch_size
    if request.receiver is not None:
        asked["callbackURL"] = request.receiver
    return asked


def name_of(ml_node: str, asked: dict[str, Any]) -> str:
    """Return the name of an ML node's round with this content: the same for the same content."""
    digest = hashlib.sha256(json.dumps([ml_node, asked], sort_keys=True).encode()).hexdigest()
    return f"network-{asked['blockHeight']}-{digest[:10]}"
