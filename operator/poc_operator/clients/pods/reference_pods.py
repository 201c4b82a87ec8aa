# SPDX-License-Identifier: Apache-2.0
"""Pods that run the protocol's reference implementation, told in the words of ours.

Such a pod knows neither rounds nor sessions, begins every slot at index 0, and says nothing about a
round that is over. Its container's id stands for the session, what it computes is recognised by
comparing the round's parameters, and what it has processed counts as delivered: nothing tells how
much of that its receiver got.
"""

import json
import re
from http import HTTPStatus
from typing import Annotated, Literal

from pydantic import Discriminator, Tag, ValidationError

from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.clients.errors import PodBusy, PodRefused
from poc_operator.observed import PodView
from vllm_poc.wire.answers import CommandResponse, Index, PowState, RoundConfig, RoundStats, StatusResponse
from vllm_poc.wire.messages import DEFAULT_K_DIM, MAX_TEXT, Protocol, Scheme, ShortText, WireMessage

#: The first release of the reference's plugin with the decode scheme.
_DECODE_RELEASE = (0, 2)


class ReferenceConfig(WireMessage):
    """What a reference pod computes."""

    block_hash: str
    block_height: Index
    public_key: str
    node_id: Index
    node_count: Index
    group_id: Index
    n_groups: Index
    seq_len: Index
    k_dim: Index


class ReferenceStatus(WireMessage):
    """``GET status`` of a reference pod; ``config`` is null while it is idle."""

    status: Literal[PowState.IDLE, PowState.GENERATING]
    config: ReferenceConfig | None = None
    stats: RoundStats | None = None


class PodVersions(WireMessage):
    """``GET versions`` of any pod. A pod that does not say that it validates beside inference does not.

    Ours say which ``schemes`` they offer. The reference does not: from release 0.2 on its plugin computes both.
    ``rebuilt_codebook`` says that chains are of a codebook that is not the network's: they are worth nothing to it.
    """

    vllm_version: ShortText = ""
    gonka_poc_version: ShortText = ""
    poc_validation_inference: bool = False
    schemes: list[ShortText] | None = None
    rebuilt_codebook: bool = False

    @property
    def offers(self) -> frozenset[Scheme]:
        """The schemes of artifacts that may be ordered; words of later releases are left out.

        Chains of a rebuilt codebook are none that a round or a validation may have.
        """
        if self.schemes is not None:
            left_out = {Scheme.DECODE} if self.rebuilt_codebook else set[Scheme]()
            return frozenset(scheme for scheme in Scheme if scheme in self.schemes) - left_out
        release = re.match(r"(\d+)[.](\d+)", self.gonka_poc_version)
        decodes = release is not None and (int(release[1]), int(release[2])) >= _DECODE_RELEASE
        return frozenset(Scheme) if decodes else frozenset({Scheme.PREFILL})


class ReferenceCommand(WireMessage):
    """A reference pod's answer to a start or a stop; what it says beside that it was done is not needed."""

    status: Literal["OK"]


class _VllmError(WireMessage):
    message: str


class _ReferenceError(WireMessage):
    error: _VllmError | None = None
    detail: object = None


def _whose(answer: object) -> str:
    fields = answer.get("pow_status", answer) if isinstance(answer, dict) else {}
    return "ours" if isinstance(fields, dict) and "session_id" in fields else "reference"


#: An answer without a session is the reference's. One with a session must be all that ours must be.
Status = Annotated[
    Annotated[StatusResponse, Tag("ours")] | Annotated[ReferenceStatus, Tag("reference")], Discriminator(_whose)
]

Command = Annotated[
    Annotated[CommandResponse, Tag("ours")] | Annotated[ReferenceCommand, Tag("reference")], Discriminator(_whose)
]


def as_ours(answer: ReferenceStatus, pod: PodView, port: int, round_: PoCRound | None) -> StatusResponse:
    """Return a reference pod's status as one of our pods would have put it, which computes this round or another.

    ``port`` is its server's.
    """
    stats, config = answer.stats or RoundStats(), answer.config
    processed = stats.total_processed
    # It does not say which scheme it computes: that of the round which it was told, for all that is known.
    is_ours = round_ is not None and config is not None and _is_of(round_, config)
    protocol = round_.spec.protocol if round_ is not None and is_ours else Protocol.ARTIFACT
    return StatusResponse(
        status=answer.status,
        state=answer.status,
        config=RoundConfig(**config.model_dump(), protocol=protocol, batch_size=0) if config else None,
        stats=stats,
        total_checked=processed,
        total_valid=processed,
        rate_per_second=stats.nonces_per_second,
        session_id=pod.server(port),
        round_id=round_.id if round_ is not None and is_ours else None,
        next_index=processed,
        delivered_index=processed,
        delivered_valid=processed,
    )


def _is_of(round_: PoCRound, config: ReferenceConfig) -> bool:
    """Whether the pod computes a slot of this round; which one, ``config`` tells."""
    spec = round_.spec
    wanted = (spec.block_hash, spec.block_height, spec.public_key, spec.nodes.count, round_.status.groups)
    runs = (config.block_hash, config.block_height, config.public_key, config.node_count, config.n_groups)
    if wanted != runs or spec.protocol is Protocol.DISTANCE:
        return False
    k_dim = spec.artifact.k_dim if spec.artifact is not None else DEFAULT_K_DIM
    return (spec.model.seq_len, k_dim) == (config.seq_len, config.k_dim)


_REASONS = {
    HTTPStatus.BAD_REQUEST: "InvalidRequest",
    HTTPStatus.UNPROCESSABLE_ENTITY: "InvalidRequest",
    HTTPStatus.SERVICE_UNAVAILABLE: "EngineNotReady",
}
_MODEL_MISMATCH = "ModelMismatch"
#: What vLLM's handler of errors answers where the reference refuses parameters: it fails on the explanation.
_LOST_EXPLANATION = "expected string or bytes-like object, got 'dict'"
_EXPLANATION = (
    f"the pod serves another model, seq_len or k_dim, and its server fails to say which ({_LOST_EXPLANATION})"
)
# What was sent is repeated in explanations, and the callback address in it has a password, which may be cut off.
_SENT = re.compile(r", 'input': .*")
_ADDRESS = re.compile(r"https?://[^\s'\"]*")


def refusal(status: int, body: bytes) -> PodRefused | None:
    """Return why a reference pod declined; None if the answer is not one of its refusals.

    The server wraps its explanation as vLLM does, or, alone in a FastAPI, as that does.
    """
    try:
        answer = _ReferenceError.model_validate_json(body)
    except ValidationError:
        return None
    explained = answer.error.message if answer.error is not None else answer.detail
    if explained is None:
        return None
    text = explained if isinstance(explained, str) else json.dumps(_without_input(explained))
    text = without_addresses(text)[:MAX_TEXT]
    if text == _LOST_EXPLANATION:
        return PodRefused(_MODEL_MISMATCH, _EXPLANATION)
    if status == HTTPStatus.CONFLICT:
        return PodBusy("RoundConflict", text) if isinstance(explained, str) else PodRefused(_MODEL_MISMATCH, text)
    return PodRefused(_REASONS[HTTPStatus(status)], text) if status in _REASONS else None


def without_addresses(text: str) -> str:
    """Return the text in one line without the addresses in it, nor what a request had."""
    return " ".join(_ADDRESS.sub("(address)", _SENT.sub("", text)).split())


def _without_input(detail: object) -> object:
    """Return FastAPI's list of mistakes without what was sent."""
    if not isinstance(detail, list):
        return detail
    return [
        {key: told for key, told in mistake.items() if key != "input"}
        for mistake in detail
        if isinstance(mistake, dict)
    ]
