# SPDX-License-Identifier: Apache-2.0
"""Messages about named nonces: ``POST generate`` computes or compares them, ``POST validate`` judges claimed distances.

The answer to ``generate`` is its result, or the state of its job.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from vllm_poc.wire.artifacts import Artifact, Chain, Encoding
from vllm_poc.wire.chain_verdict import NonceVerdict
from vllm_poc.wire.messages import CallbackRequest, Nonce, Protocol, WireMessage
from vllm_poc.wire.stat_test import ArtifactVerdict, StatTest, Verdict

#: Largest number of nonces that one request may name.
MAX_REQUEST_NONCES = 100_000

#: Chains of which all that are wrong are named.
_CHAINS_AT_ONCE = 1_000

#: The first that is wrong is named alone: there may be a hundred thousand.
Nonces = Annotated[list[Nonce], Field(min_length=1, max_length=MAX_REQUEST_NONCES), FailFast()]


class Validation(WireMessage):
    """The artifacts to compare with, one for each of the request's nonces."""

    artifacts: Annotated[list[Artifact], Field(min_length=1, max_length=MAX_REQUEST_NONCES), FailFast()]

    @model_validator(mode="after")
    def _nonces_are_unique(self) -> Self:
        refuse_duplicates("validation.artifacts", (artifact["nonce"] for artifact in self.artifacts))
        return self


class GenerateRequest(CallbackRequest):
    """Compute the named nonces; with ``validation``, answer with a verdict instead of the results.

    With ``wait`` the answer has the result, and no callback is made. Without, the work is queued, and its
    result is fetched by ``GET generate/{request_id}`` or comes by callback.
    """

    nonces: Nonces
    # The protocol's clients always send them; they say nothing about the nonces.
    node_id: int = 0
    node_count: int = 1
    wait: bool = False
    validation: Validation | None = None
    stat_test: StatTest | None = None
    # Ours, with ``wait``: compute at once, between the slices of a round that generates, not after its end.
    beside_round: bool = False
    # Decode scheme: the chains whose steps are repeated, instead of those in ``validation``.
    enforced_k_steps: dict[Nonce, Chain] | None = None
    # Not passed on: it is here to be refused, since ignoring it gives other results.
    per_nonce_reflection: bool = Field(default=False, exclude=True)

    @field_validator("enforced_k_steps", mode="wrap")
    @classmethod
    def _piece_by_piece(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        if not isinstance(value, dict):
            return handler(value)
        found, chains = dict[int, Any](), iter(value.items())
        while piece := dict(islice(chains, _CHAINS_AT_ONCE)):
            found |= handler(piece)
        return found

    @field_validator("per_nonce_reflection")
    @classmethod
    def _no_other_reflections(cls, value: object) -> object:
        if value:
            raise ValueError("is not supported: leave it out, as the network does")
        return value

    @model_validator(mode="after")
    def _nonces_are_unique(self) -> Self:
        refuse_duplicates("nonces", self.nonces)
        if self.validation is not None and self.protocol is Protocol.DISTANCE:
            raise ValueError("validation compares artifacts and needs params; distances are compared by POST validate")
        if self.beside_round and not self.wait:
            raise ValueError("beside_round needs wait: queued work waits for the end of a round")
        if self.enforced_k_steps is not None:
            self._check_enforced(self.enforced_k_steps)
        return self

    def _check_enforced(self, chains: Mapping[int, object]) -> None:
        if self.protocol is not Protocol.DECODE:
            raise ValueError("enforced_k_steps belongs to the decode scheme: leave it out, or send params.decode")
        if chains.keys() != set(self.nonces):
            raise ValueError("enforced_k_steps must have a chain for each of nonces and no other")
        if not all(chains.values()):
            raise ValueError("enforced_k_steps has an empty chain: send at least one step for each of nonces")

    @property
    def claims(self) -> Mapping[int, Sequence[int]]:
        """The chains whose steps are repeated, by nonce: of the decode scheme, and none where the steps are free."""
        if self.enforced_k_steps is not None or self.validation is None or self.protocol is not Protocol.DECODE:
            return self.enforced_k_steps or {}
        found = ((artifact["nonce"], artifact.get("k_points_steps")) for artifact in self.validation.artifacts)
        return {nonce: chain for nonce, chain in found if chain}

    def unclaimed(self) -> list[int]:
        """Return the nonces whose artifact has no chain to compare with, as each must have in the decode scheme."""
        if self.validation is None or self.protocol is not Protocol.DECODE:
            return []
        claims = self.claims
        return [nonce for nonce in self.nonces if nonce not in claims]

    def unmatched(self) -> tuple[Set[int], Set[int]]:
        """Return the nonces without an artifact to compare, and those of artifacts that are not among the nonces."""
        if self.validation is None:
            return set(), set()
        wanted, received = set(self.nonces), {artifact["nonce"] for artifact in self.validation.artifacts}
        return wanted - received, received - wanted


#: Where the callback of queued work stands.
CallbackState = Literal["pending", "delivered", "rejected", "given up"]


class JobState(StrEnum):
    """State of queued work."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Completed(WireMessage):
    """What all results have. ``not_computed`` names nonces whose result was NaN or infinite on this server."""

    status: Literal[JobState.COMPLETED] = JobState.COMPLETED
    request_id: str
    # Ours.
    not_computed: list[int] = Field(default_factory=list)
    # Decode scheme, and only there if it is so: the codebook is not the network's, so that this is an experiment.
    rebuilt_codebook: Literal[True] | None = None
    # Of queued work with a callback address: where its callback stands, and the last thing that went wrong.
    callback: CallbackState | None = None
    callback_error: str | None = None


class GeneratedResponse(Completed):
    """Artifacts or distances, in the order of the nonces."""

    # Artifact protocol.
    artifacts: list[Artifact] | None = None
    encoding: Encoding | None = None
    # Distance protocol.
    nonces: list[int] | None = None
    distances: list[float] | None = None
    total_checked: int | None = None
    total_valid: int | None = None
    valid_nonces: list[int] | None = None
    valid_distances: list[float] | None = None


class ValidatedResponse(Completed, ArtifactVerdict):
    """The verdict on received artifacts."""

    # Decode scheme: the comparison of each nonce.
    per_nonce: list[NonceVerdict] | None = None


class JobResponse(WireMessage):
    """State of work without a result. ``error`` says why it failed or was cancelled."""

    status: Literal[JobState.QUEUED, JobState.RUNNING, JobState.FAILED, JobState.CANCELLED]
    request_id: str
    #: In the answer to ``POST generate``: all nonces that now wait or are computed, the request's included.
    queued_count: int | None = None
    error: str | None = None


class ProofBatch(WireMessage):
    """What a prover sent to its receiver.

    The recomputation takes the public key from here and everything else from this server's round, so that a
    batch of another block is found out. ``block_hash``, ``block_height`` and ``node_id`` are the sender's
    words and are not used.
    """

    public_key: str = Field(min_length=1, max_length=1024)
    block_hash: str
    block_height: int
    node_id: int = 0
    nonces: Nonces
    #: One for each nonce, in the same order.
    dist: Annotated[list[float], Field(max_length=MAX_REQUEST_NONCES), FailFast()]

    @model_validator(mode="after")
    def _lists_run_parallel(self) -> Self:
        refuse_duplicates("nonces", self.nonces)
        if len(self.dist) != len(self.nonces):
            raise ValueError(f"dist has {len(self.dist)} entries for {len(self.nonces)} nonces: send one for each")
        return self


class ProofVerdict(Verdict):
    """The answer. ``computed_distances`` runs parallel to the batch's nonces, null where not computed."""

    status: Literal["OK"] = "OK"
    computed_distances: list[float | None]


def refuse_duplicates(field: str, nonces: Iterable[int]) -> None:
    """Raise ValueError if a nonce is named twice."""
    seen: set[int] = set()
    for nonce in nonces:
        if nonce in seen:
            raise ValueError(f"{field} must be unique, but nonce {nonce} is there twice")
        seen.add(nonce)
