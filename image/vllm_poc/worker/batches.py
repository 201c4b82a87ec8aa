# SPDX-License-Identifier: Apache-2.0
"""The messages between the API server process and the workers.

They travel through ``collective_rpc`` by method name, as plain dictionaries of plain values, so
that nothing has to be pickled.
"""

from typing import NotRequired, TypedDict


class BatchRequest(TypedDict):
    """These nonces of this round, in forward passes of ``batch`` nonces and a last one of what is left.

    ``ahead`` are the nonces that the next request will probably ask for in the same way: the workers begin them
    before they answer, so that the device has work meanwhile. If it asks for others, that work is dropped.
    """

    protocol: str
    block_hash: str
    public_key: str
    nonces: list[int]
    seq_len: int
    k_dim: int
    strong_rng: bool
    layer_hooks: bool
    sign_flips: bool
    batch: int
    ahead: list[int]


class Rehearsal(TypedDict):
    """How long a forward pass takes that was prepared for repetition; None if the device's memory is too small."""

    seconds: float | None


class BatchResult(TypedDict):
    """What the first tensor-parallel rank of the last pipeline stage answers; the other ranks answer None.

    ``nonces`` lists the nonces with a finite result, in request order. ``distances`` (distance
    protocol) or ``vectors`` (artifact protocol; base64 of k_dim fp16 little-endian numbers) run
    parallel to it. ``not_finite`` lists the nonces whose result was NaN or infinite.
    """

    nonces: list[int]
    not_finite: list[int]
    distances: NotRequired[list[float]]
    vectors: NotRequired[list[str]]


class ModelFacts(TypedDict):
    """What a worker says about its model; ``refusal`` is the reason why PoC cannot run on it.

    ``fused`` says whether its forward pass is PoC's faster one, whose batches are worth a rehearsal.
    """

    hidden_size: int
    num_layers: int
    max_model_len: int
    max_batch_tokens: int
    max_batch_nonces: int
    scratch_bytes: int
    fused: bool
    refusal: str | None


class Failure(TypedDict):
    """Any worker's answer in place of the others: one sentence.

    A worker never raises: vLLM would read the first rank's error and leave the answers of the other ranks
    to be taken for those of its next call, which may be chat's.
    """

    error: str
