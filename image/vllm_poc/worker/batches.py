# SPDX-License-Identifier: Apache-2.0
"""The messages between the API server process and the workers.

They travel through ``collective_rpc`` by method name, as plain dictionaries of plain values, so
that nothing has to be pickled.
"""

from typing import NotRequired, TypedDict

#: Kinds of forward passes that the workers keep prepared, those asked for last; each holds the memory of one.
MOST_PREPARED = 4
#: Steps that a device has been given at a time: it begins the next one while the answer to the last travels.
UNDER_WAY = 2


class BatchRequest(TypedDict):
    """These nonces of this round, in forward passes of ``batch`` nonces and a last one of what is left.

    Where a forward pass was prepared in parts, or the model is a pipeline, an answer that is not complete says that the
    same request is to be repeated: the workers go on where they were. ``ahead`` are the nonces of the requests that
    will follow, in the same way, as many as are known and at most those that the stages of a pipeline need: the workers
    begin them meanwhile, so that no device is without work. If others follow, that work is dropped.
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
    ahead: list[list[int]]


class Rehearsal(TypedDict):
    """How long a stage takes for a forward pass that was prepared for repetition, and in how many parts it runs.

    None if the device's memory is too small.
    """

    seconds: float | None
    parts: int


class BatchResult(TypedDict):
    """What the first tensor-parallel rank of the last pipeline stage answers; the other ranks answer None.

    Without results if it is not ``complete``. ``nonces`` lists the nonces with a finite result, in request order.
    ``distances`` (distance protocol) or ``vectors`` (artifact protocol; base64 of k_dim fp16 little-endian numbers) run
    parallel to it. ``not_finite`` lists the nonces whose result was NaN or infinite.
    """

    complete: bool
    nonces: list[int]
    not_finite: list[int]
    distances: NotRequired[list[float]]
    vectors: NotRequired[list[str]]


class ModelFacts(TypedDict):
    """What a worker says about its model; ``refusal`` is the reason why PoC cannot run on it.

    ``max_batch_tokens`` and ``max_batch_nonces`` are those of the largest pass that needs no rehearsal. ``fused`` says
    whether its forward pass is PoC's faster one; then ``max_prepared_tokens`` and ``max_prepared_nonces`` are those of
    the largest one that is worth a rehearsal, else 0. ``stages`` is the length of the pipeline. ``attention`` and
    ``experts`` are the names of the kernels that compute these, empty where there are none or they have no name.
    """

    hidden_size: int
    num_layers: int
    max_model_len: int
    max_batch_tokens: int
    max_batch_nonces: int
    max_prepared_tokens: int
    max_prepared_nonces: int
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
