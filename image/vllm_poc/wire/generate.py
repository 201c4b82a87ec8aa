# SPDX-License-Identifier: Apache-2.0
"""The body of ``POST generate``: compute named nonces, and compare them with received artifacts if asked to."""

from collections.abc import Iterable, Set
from typing import Annotated, Self

from pydantic import AliasChoices, Field, model_validator

from vllm_poc.wire.artifacts import Artifact
from vllm_poc.wire.base import Nonce, Protocol, WireMessage
from vllm_poc.wire.requests import CallbackRequest, Probability

#: Largest number of nonces that one request may name.
MAX_REQUEST_NONCES = 100_000

Nonces = Annotated[list[Nonce], Field(min_length=1, max_length=MAX_REQUEST_NONCES)]


class StatTest(WireMessage):
    """When received artifacts count as fraud; see `vllm_poc.wire.fraud`."""

    #: L2 distance beyond which two vectors mismatch.
    dist_threshold: float = Field(default=0.02, ge=0)
    #: Probability that an honest prover's nonce mismatches.
    p_mismatch: Probability = 0.001
    #: A p-value strictly below is fraud. The chain's client calls it ``p_value_threshold``; where both
    #: are there, ``fraud_threshold`` counts.
    fraud_threshold: Probability = Field(
        default=0.01, validation_alias=AliasChoices("fraud_threshold", "p_value_threshold")
    )


class Validation(WireMessage):
    """The artifacts to compare with, one for each of the request's nonces."""

    artifacts: list[Artifact] = Field(min_length=1, max_length=MAX_REQUEST_NONCES)

    @model_validator(mode="after")
    def _nonces_are_unique(self) -> Self:
        refuse_duplicates("validation.artifacts", (artifact.nonce for artifact in self.artifacts))
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

    @model_validator(mode="after")
    def _nonces_are_unique(self) -> Self:
        refuse_duplicates("nonces", self.nonces)
        if self.validation is not None and self.protocol is not Protocol.ARTIFACT:
            raise ValueError("validation compares artifacts and needs params; distances are compared by POST validate")
        if self.beside_round and not self.wait:
            raise ValueError("beside_round needs wait: queued work waits for the end of a round")
        return self

    def unmatched(self) -> tuple[Set[int], Set[int]]:
        """Return the nonces without an artifact to compare, and those of artifacts that are not among the nonces."""
        if self.validation is None:
            return set(), set()
        wanted, received = set(self.nonces), {artifact.nonce for artifact in self.validation.artifacts}
        return wanted - received, received - wanted


def refuse_duplicates(field: str, nonces: Iterable[int]) -> None:
    """Raise ValueError if a nonce is named twice."""
    seen: set[int] = set()
    for nonce in nonces:
        if nonce in seen:
            raise ValueError(f"{field} must be unique, but nonce {nonce} is there twice")
        seen.add(nonce)
