# SPDX-License-Identifier: Apache-2.0
"""What a pod posts to ``{callback}/generated`` and ``{callback}/validated``. Success is HTTP 2xx."""

from http import HTTPStatus
from typing import Literal

from vllm_poc.wire.artifacts import Artifact, Encoding
from vllm_poc.wire.messages import Nonce, WireMessage
from vllm_poc.wire.stat_test import ArtifactVerdict, Verdict

#: User in the callback addresses that the operator makes for the gateway: whoever answers there stands before it.
GATEWAY_USER = "pod"
#: Realm of the gateway's 401: the address is not valid now, as while keys are changed, and may be replaced.
GATEWAY_REALM = "poc-gateway"
#: Reason of the gateway's 404 while it does not know the round: it may come to know it, so that nothing is lost.
ROUND_UNKNOWN = "RoundUnknown"
#: Header of the gateway's answers to callbacks it has stored. A 404 after such an answer is that of a proxy before it.
GATEWAY_HEADER = "X-PoC-Gateway"
#: A receiver's client errors about the address or the sender: no part of the payload would fare better.
NOT_ABOUT_CONTENT = frozenset(
    {
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.GONE,
    }
)


class Callback(WireMessage):
    """What all callbacks say about the round."""

    public_key: str
    block_hash: str
    block_height: int


class GeneratedArtifacts(Callback):
    """``/generated`` of the artifact protocol: every computed nonce with its vector, or with its chain.

    In the decode scheme the vector is the empty string, and the encoding says nothing.
    """

    node_id: int
    artifacts: list[Artifact]
    encoding: Encoding
    #: Of queued work; absent while a round runs.
    request_id: str | None = None
    #: Ours: the codebook is not the network's. Absent otherwise.
    rebuilt_codebook: Literal[True] | None = None


class GeneratedDistances(Callback):
    """``/generated`` of the distance protocol: the valid nonces (distance below ``r_target``)."""

    node_id: int
    nonces: list[Nonce]
    dist: list[float]
    r_target: float
    #: Of queued work; absent while a round runs.
    request_id: str | None = None


class ValidatedArtifacts(Callback, ArtifactVerdict):
    """``/validated`` of the artifact protocol: the verdict of queued work."""

    request_id: str
    node_id: int
    #: Ours: the codebook is not the network's. Absent otherwise.
    rebuilt_codebook: Literal[True] | None = None


class ValidatedDistances(Callback, Verdict):
    """``/validated`` of the distance protocol: the lists run parallel and leave out what was not computed."""

    nonces: list[Nonce]
    computed_distances: list[float]
    received_distances: list[float]
    valid: list[bool]
