# SPDX-License-Identifier: Apache-2.0
"""The network's rounds: one at a time, each a PoCRound made from the template and what the request brings.

The template is a file with ``namespace`` and ``spec``, the start of a PoCRound's; the request brings block, key, node
id, model, protocol and receiver. Nothing is remembered here: which round is active, the API server is asked each time.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from poc_gateway.errors import Refusal
from poc_gateway.node_api.cluster import Cluster
from poc_operator.apis.v1alpha1.meta import LabelSelector
from poc_operator.apis.v1alpha1.round import PoCRound, RoundSpec
from poc_operator.apis.v1alpha1.schema import aliases
from poc_operator.apis.v1alpha1.status import State
from poc_operator.clients.errors import ObjectInvalid, StaleObject
from vllm_poc.wire.messages import InitGenerateRequest

#: An operator that runs has looked at a round well before.
UNSEEN_SECONDS = 10.0
#: So long a stop waits for the results to be flushed, and how often it looks.
STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.5

_OF_THE_REQUEST = {"blockHash", "blockHeight", "publicKey", "rTarget", "artifact", "callbackURL"}


class RoundTemplate(BaseModel):
    """Where the network's rounds are created, and the part of their spec that the cluster decides."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field(min_length=1)
    spec: dict[str, Any]

    @field_validator("spec")
    @classmethod
    def _leaves_the_rest_to_the_request(cls, spec: dict[str, Any]) -> dict[str, Any]:
        foreign = sorted(_OF_THE_REQUEST & spec.keys())
        if foreign:
            raise ValueError(f"{', '.join(foreign)} come with each request: remove them from the template")
        if set(spec.get("nodes") or {}) - {"groups"}:
            raise ValueError("nodes may only have groups: the ids come with each request")
        unknown = sorted(spec.keys() - aliases(RoundSpec).values())
        if unknown:
            raise ValueError(f"a PoCRound's spec has no {', '.join(unknown)}: see `kubectl explain pocround.spec`")
        if "selector" not in spec:
            raise ValueError("selector is missing: name the labels of the pods that serve the network")
        if not str(LabelSelector.model_validate(spec["selector"])):
            raise ValueError("selector is empty and would take every pod: set matchLabels or matchExpressions")
        return spec

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML or JSON file; ValueError says what is wrong with it."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text()))
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            what = str(error)
        raise ValueError(f"POC_GATEWAY_ROUND_TEMPLATE={path}: {what}")

    @property
    def selector(self) -> LabelSelector:
        """Which pods serve the network."""
        return LabelSelector.model_validate(self.spec["selector"])

    @property
    def port(self) -> int:
        """The port of the pods' server; the CRD's default unless told otherwise."""
        return int(self.spec.get("port", 8000))

    def spec_of(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return a round's whole spec."""
        nodes = {**(self.spec.get("nodes") or {}), **asked["nodes"]}
        return {**self.spec, **asked, "nodes": nodes}


class NetworkRounds:
    """The rounds that carry the network's label."""

    def __init__(self, cluster: Cluster, template: RoundTemplate, *, stop_seconds: float = STOP_SECONDS) -> None:
        self._cluster = cluster
        self._template = template
        self._stop_seconds = stop_seconds
        self._starting = asyncio.Lock()

    async def active(self) -> PoCRound | None:
        """Return the newest round that is not over. StoreError if the API server cannot be asked."""
        return next(iter(_active(await self._cluster.list_rounds())), None)

    async def start(self, request: InitGenerateRequest, model: str) -> PoCRound:
        """Create the round, unless it runs already; refused with 409 while another one is not over."""
        asked = asked_of(request, model)
        async with self._starting:
            rounds = await self._cluster.list_rounds()
            running = next(iter(_active(rounds)), None)
            if running is not None:
                return _same(running, name_of(asked))
            name = _free_name(name_of(asked), rounds)
            try:
                return await self._cluster.create(name, self._template.spec_of(asked))
            except ObjectInvalid as error:
                raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "InvalidRequest", str(error)) from error
            except StaleObject:
                detail = (
                    f"there is a PoCRound {name} that is not labelled as the network's, or cannot be read: delete it"
                )
                raise Refusal(HTTPStatus.CONFLICT, "RoundConflict", detail) from None

    async def stop(self) -> Sequence[PoCRound]:
        """End what is active and wait until its results are flushed; return the rounds that have yet to end."""
        rounds = _active(await self._cluster.list_rounds())
        for round_ in rounds:
            await self._cluster.finish(round_.metadata.name)
        ending = {round_.id for round_ in rounds}
        deadline = monotonic() + self._stop_seconds
        while rounds and monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
            rounds = [round_ for round_ in _active(await self._cluster.list_rounds()) if round_.id in ending]
        return rounds


def waits_for_operator(round_: PoCRound) -> str | None:
    """Say so if no operator has looked at the round for a while."""
    age = (datetime.now(UTC) - round_.metadata.creation_timestamp).total_seconds()
    if round_.status.observed_generation or age <= UNSEEN_SECONDS:
        return None
    return f"the operator has not picked up round {round_.metadata.name} yet: look whether it runs"


def _active(rounds: Sequence[PoCRound]) -> list[PoCRound]:
    found = [round_ for round_ in rounds if not round_.status.state.finished]
    return sorted(found, key=lambda round_: round_.metadata.creation_timestamp, reverse=True)


def _same(running: PoCRound, name: str) -> PoCRound:
    ends = running.spec.finish or running.status.state is State.STOPPING or running.metadata.deletion_timestamp
    if _content(running) == name and not ends:
        return running
    state = "is being stopped, try again when it is over" if ends else f"is {running.status.state}, stop it first"
    detail = f"Already generating: round {running.metadata.name} at height {running.spec.block_height} {state}"
    raise Refusal(HTTPStatus.CONFLICT, "RoundConflict", detail)


def _content(round_: PoCRound) -> str:
    return "-".join(round_.metadata.name.split("-")[:3])


def _free_name(name: str, rounds: Sequence[PoCRound]) -> str:
    """Return the name, numbered if rounds of the same content have ended: they were stopped, and are asked for anew."""
    taken = {round_.metadata.name for round_ in rounds}
    attempts = (f"{name}-{number}" if number > 1 else name for number in range(1, len(taken) + 2))
    return next(attempt for attempt in attempts if attempt not in taken)


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
    if request.params is not None:
        asked["artifact"] = {"kDim": request.params.k_dim}
    else:
        asked["rTarget"] = format(Decimal(repr(request.r_target)), "f")
    if "batch_size" in request.model_fields_set:
        asked["batchSize"] = request.batch_size
    if request.receiver is not None:
        asked["callbackURL"] = request.receiver
    return asked


def name_of(asked: dict[str, Any]) -> str:
    """Return the name of the round with this content: the same for the same content."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return f"network-{asked['blockHeight']}-{digest[:10]}"
