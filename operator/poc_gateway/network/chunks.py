# SPDX-License-Identifier: Apache-2.0
"""The part of a request that one pod computes at a time, and what its answer must be."""

from collections.abc import Sequence
from typing import Any

from vllm_poc.wire.artifacts import decode_vector
from vllm_poc.wire.generate import GeneratedResponse, GenerateRequest, ValidatedResponse

#: Most batches and most nonces of a chunk: a large model computes a few nonces per second, and what a pod that fails
#: had begun is computed again.
_BATCHES = 4
_NONCES = 200
#: Bytes of an answer's vectors, well below what the pods' client accepts.
_ANSWER_BYTES = 512 * 1024

_ASKED: dict[str, Any] = {
    "wait": True,
    "beside_round": True,
    "validation": None,
    "stat_test": None,
    "url": None,
    "callback_url": None,
    "round_id": None,
}


def size_of(request: GenerateRequest, waiting: int, pods: int) -> int:
    """Return the nonces of the next chunk: an even share, but no less than a batch and no more than is prudent."""
    most = min(_BATCHES * request.batch_size, _NONCES)
    if request.params is not None:
        most = min(most, max(1, _ANSWER_BYTES // (3 * request.params.k_dim + 64)))
    share = -(-len(request.nonces) // max(pods, 1))
    return min(max(share, request.batch_size), most, waiting)


def request_of(request: GenerateRequest, nonces: Sequence[int]) -> GenerateRequest:
    """Return what a pod is asked: results to be compared here, also between the slices of a round."""
    return request.model_copy(update=_ASKED | {"nonces": list(nonces)})


def values_of(
    request: GenerateRequest, nonces: Sequence[int], answer: GeneratedResponse | ValidatedResponse
) -> dict[int, str | float | None]:
    """Return a pod's results by nonce. ValueError if they are not those of the nonces."""
    if isinstance(answer, ValidatedResponse):
        raise ValueError("the pod answered a verdict that it was not asked for")
    values: dict[int, str | float | None] = dict.fromkeys(answer.not_computed)
    if request.params is not None:
        for artifact in answer.artifacts or []:
            decode_vector(artifact.vector_b64, request.params.k_dim)
            values[artifact.nonce] = artifact.vector_b64
    else:
        values.update(zip(answer.nonces or [], answer.distances or [], strict=True))
    if values.keys() != set(nonces):
        raise ValueError(f"the pod answered for {len(values)} nonces, not for the {len(nonces)} that it was asked for")
    return values
