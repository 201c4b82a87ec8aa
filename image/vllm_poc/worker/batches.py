# SPDX-License-Identifier: Apache-2.0
"""The messages between the API server process and the workers.

They travel through ``collective_rpc`` by method name, as plain dictionaries of plain values, so
that nothing has to be pickled.
"""

from typing import NotRequired, TypedDict

#: Kinds of forward passes that the workers keep prepared, those used last; each holds the memory of one.
MOST_PREPARED = 4


class BatchRequest(TypedDict):
    """These nonces of this round, in forward passes of ``batch`` nonces and a last one of what is left.

    A single forward pass that was prepared in parts takes one request for each ``part``, counted from 0, in their
    order: the last is answered with the result, the others with none. ``ahead`` are the nonces that the next request
    will probably ask for in the same way: the workers begin them, or the next part, before they answer, so that the
    device has work meanwhile. If it asks for others, that work is dropped.
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
    part: int
    ahead: list[int]


class Rehearsal(TypedDict):
    """How long a forward pass takes that was prepared for repetition, and in how many parts it runs.

    None if the device's memory is too small.
    """

    seconds: float | None
    parts: int


class BatchResult(TypedDict):
    """What the first tensor-parallel rank of the last pipeline stage answers; the other ranks answer None.

    ``parts`` is how many requests a forward pass takes; none but the last has results.
    ``nonces`` lists the nonces with a finite result, in request order. ``distances`` (distance
    protocol) or ``vectors`` (artifact protocol; base64 of k_dim fp16 little-endian numbers) run
    parallel to it. ``not_finite`` lists the nonces whose result was NaN or infinite.
    """

    parts: int
    nonces: list[int]
    not_finite: list[int]
    distances: NotRequired[list[float]]
    vectors: NotRequired[list[str]]


class ModelFacts(TypedDict):
    """What a worker says about its model; ``refusal`` is the reason why PoC cannot run on it.

    ``max_batch_tokens`` and ``max_batch_nonces`` are those of the largest pass that needs no rehearsal. ``fused`` says
    whether its forward pass is PoC's faster one; then ``max_prepared_tokens`` is the size of the largest one that is
    worth a rehearsal, else 0. ``stages`` is the length of the pipeline. ``attention`` and ``experts`` are the names of
    the kernels that compute these, empty where there are none or they have no name.
    """

    hidden_size: int
    num_layers: int
    max_model_len: int
    max_batch_tokens: int
    max_batch_nonces: int
    max_prepared_tokens: int
    scratch_bytes: int
    fused: bool
    stages: int
    attention: list[str]
    experts: list[str]
    refusal: str | None


class Failure(TypedDict):
    """Any worker's answer in place of the others: one sentence.

    A worker never raises: vLLM would read the first rank's error and leave the answers of the other ranks
    to be taken for those of its next call, which may be chat's.
    """

    error: str
