# SPDX-License-Identifier: Apache-2.0
"""Messages between the API server's process and vLLM's workers.

They travel through ``collective_rpc`` by method name, as plain dictionaries of plain values, so that nothing has to
be pickled:

- ``poc_describe(seconds) -> ModelFacts``
- ``poc_rest() -> dict``
- ``poc_compute(BatchRequest) -> BatchResult``
- ``poc_warm_up(BatchRequest, segment_seconds, keep) -> PassTiming``
- ``poc_prepare_decode(DecodeSetup) -> DecodeFacts``
- ``poc_decode(DecodeRequest) -> DecodeResult``

Any of them may answer `Failure` instead.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, NotRequired, Self, TypeAlias, TypedDict

from vllm_poc.wire.messages import Protocol, RoundRequest

#: Steps that a device has been given at a time: it begins the next one while the answer to the last travels.
STEPS_IN_FLIGHT = 2


class PassFields(TypedDict):
    """A `PassSpec` as part of a message."""

    protocol: str
    seq_len: int
    k_dim: int
    strong_rng: bool
    layer_hooks: bool
    sign_flips: bool


class BatchRequest(PassFields):
    """These nonces of this round, in forward passes of ``batch`` nonces and a last one of what is left.

    Where a forward pass was captured in segments, or the model is a pipeline, an answer that is not complete says that
    the same request is to be repeated: the workers go on where they were. ``ahead`` are the nonces of the requests that
    will follow, in the same way, as many as are known and at most those that the stages of a pipeline need: the workers
    begin them meanwhile, so that no device is without work. If others follow, that work is dropped.
    """

    block_hash: str
    public_key: str
    nonces: list[int]
    batch: int
    ahead: list[list[int]]


class PassSpec(NamedTuple):
    """What a forward pass computes, whatever the nonces: the same for all batches of a round, and for most rounds.

    Passes of one specification and size can replay one CUDA graph.
    """

    protocol: Protocol
    seq_len: int
    #: Numbers of an artifact; 0 in the distance protocol.
    k_dim: int
    #: Whether inputs come from 256-bit instead of 32-bit seeds.
    strong_rng: bool
    #: Whether each decoder layer's output is reflected.
    layer_hooks: bool
    #: Whether the last hidden state gets random signs.
    sign_flips: bool

    @classmethod
    def of(cls, fields: PassFields) -> Self:
        """Return what a message asks for."""
        return cls(
            protocol=Protocol(fields["protocol"]),
            seq_len=fields["seq_len"],
            k_dim=fields["k_dim"],
            strong_rng=fields["strong_rng"],
            layer_hooks=fields["layer_hooks"],
            sign_flips=fields["sign_flips"],
        )

    @classmethod
    def of_round(cls, request: RoundRequest) -> Self:
        """Return what a client asks for."""
        return cls(
            protocol=request.protocol,
            seq_len=request.effective_seq_len,
            k_dim=request.params.k_dim if request.params is not None else 0,
            strong_rng=request.poc_stronger_rng,
            layer_hooks=request.layer_hooks,
            sign_flips=request.sign_flips,
        )

    def fields(self) -> PassFields:
        """Return it as part of a message."""
        return PassFields(
            protocol=self.protocol.value,
            seq_len=self.seq_len,
            k_dim=self.k_dim,
            strong_rng=self.strong_rng,
            layer_hooks=self.layer_hooks,
            sign_flips=self.sign_flips,
        )


def batch_request(
    request: RoundRequest, nonces: Sequence[int], batch: int, ahead: Iterable[Sequence[int]] = ()
) -> BatchRequest:
    """Return the message for ``nonces`` of the round, ``batch`` in a forward pass, and those that follow them."""
    return BatchRequest(
        **PassSpec.of_round(request).fields(),
        block_hash=request.block_hash,
        public_key=request.public_key,
        nonces=list(nonces),
        batch=batch,
        ahead=[list(following) for following in ahead],
    )


class PassTiming(TypedDict):
    """How long a stage takes for a forward pass that was warmed up, and in how many segments it runs.

    None if the device's memory is too small.
    """

    seconds: float | None
    segments: int


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


class DecodeSetup(TypedDict):
    """What a server needs for the decode scheme.

    ``codebook`` is the path of the network's file, and None if the points are to be rebuilt for an experiment
    (``rebuild``) or nobody brought any. ``reserve_bytes`` are set aside for the keys and values of chains.
    """

    codebook: str | None
    rebuild: bool
    reserve_bytes: int


class DecodeFacts(TypedDict):
    """What a worker says about the decode scheme; ``refusal`` is the reason why it cannot run on this server.

    ``block_tokens``, ``block_bytes`` and ``kept_blocks`` run parallel, by kind of attention: how many tokens a block of
    a sequence holds, what such a block takes in all layers, and how many blocks a sequence keeps at most, 0 where it
    keeps all. ``reserve_bytes`` are for such blocks. ``rebuilt`` says that the codebook is not the network's.
    ``passes`` is the server's word for a refusal that may pass.
    ``findings`` are sentences for people about what the worker found out in its first chains.
    """

    refusal: str | None
    rebuilt: bool
    reserve_bytes: int
    block_tokens: list[int]
    block_bytes: list[int]
    kept_blocks: list[int]
    max_batch_nonces: int
    passes: NotRequired[bool]
    findings: NotRequired[list[str]]


def no_chains(refusal: str | None, *, rebuilt: bool = False) -> DecodeFacts:
    """Return the facts where the decode scheme does not run; ``refusal`` is None where another rank says why."""
    return DecodeFacts(
        refusal=refusal,
        rebuilt=rebuilt,
        reserve_bytes=0,
        block_tokens=[],
        block_bytes=[],
        kept_blocks=[],
        max_batch_nonces=0,
    )


def chain_nonces(facts: DecodeFacts, tokens: int) -> int:
    """Return how many chains of so many tokens the reserve holds at a time; 0 if not even one."""
    needed = [-(-tokens // size) for size in facts["block_tokens"]]
    blocks = [min(most or count, count) for count, most in zip(needed, facts["kept_blocks"], strict=True)]
    each = sum(count * size for count, size in zip(blocks, facts["block_bytes"], strict=True))
    # The first block of each kind of attention is left empty.
    free = facts["reserve_bytes"] - sum(facts["block_bytes"])
    return max(0, min(facts["max_batch_nonces"], free // each if each else 0))


#: What a part of the work on chains is of: the prefill of some nonces, a step whose operations the CPU starts one by
#: one, or a step that is captured as CUDA graphs.
ChainWork: TypeAlias = Literal["prefill", "step", "graph"]


class DecodeRequest(TypedDict):
    """Chains of these nonces: a prefill of ``seq_len`` tokens, and ``max_tokens`` steps of one token.

    An answer that is not complete says that the same request is to be repeated, as often as it takes: the workers do up
    to ``parts`` parts of forward passes each time, and go on where they were. Another request in between begins anew. A
    call ends with the last pass of a kind, and once a step was captured.

    ``cuts`` says into how many parts a forward pass of each kind is cut, behind layers: at most one for each. They may
    differ from call to call, and count for passes that begin then.

    ``forced`` is empty, or has the claimed indices of each nonce: each step then goes on from the claim of the step
    before. Steps behind the end of a claim go on from their own index.
    """

    block_hash: str
    public_key: str
    nonces: list[int]
    seq_len: int
    max_tokens: int
    forced: list[list[int]]
    parts: int
    cuts: dict[ChainWork, int]


class DecodeResult(TypedDict):
    """What the first rank answers; the other ranks answer None. Without results if it is not ``complete``.

    The call has done so many ``parts`` of ``work``, whose passes are ``cut`` into so many, and ``captures`` says
    whether it captured a step, too. ``left`` is how many parts the request still needs, and ``next`` of what they are.
    ``indices`` has max_tokens + 1 own indices for each nonce of the request, -1 where a hidden state was not finite.
    ``margins`` runs parallel to the claims of ``forced``: how far the claimed point scores below the best one.
    ``rebuilt`` says that the codebook is not the network's, so that the indices are for experiments alone.
    ``findings`` are sentences for people about how these chains were computed.
    """

    complete: bool
    left: int
    work: ChainWork
    parts: int
    cut: int
    captures: bool
    next: ChainWork
    indices: list[list[int]]
    margins: list[list[float]]
    rebuilt: bool
    findings: NotRequired[list[str]]


class ModelFacts(TypedDict):
    """What a worker says about its model; ``refusal`` is the reason why PoC cannot run on it.

    ``max_batch_tokens`` and ``max_batch_nonces`` are those of the largest pass that needs no warm-up. ``fused`` says
    whether its forward pass is PoC's faster one; then ``max_captured_tokens`` and ``max_captured_nonces`` are those of
    the largest one that is worth capturing, else 0. ``findings`` are sentences for people about what the worker found
    out about this server before it computed for PoC. ``stages`` is the length of the pipeline. ``attention`` and
    ``experts`` are the names of the kernels that compute these, empty where there are none or they have no name.
    ``dtype``, ``kv_cache_dtype`` and ``quantization`` are vLLM's words for how it computes and stores; the last is
    empty where weights are not quantized. ``flags`` are vLLM's further flags that may change results. ``slower`` is the
    finding that says why the pass is slower than this device allows, if it is. ``passes`` says that another
    ``poc_describe`` may find a faster one, and ``late`` that this one only had too little time. ``decode`` is what they
    say about the decode scheme, if the server is set up for it: the server adds that.
    """

    hidden_size: int
    num_layers: int
    max_model_len: int
    max_batch_tokens: int
    max_batch_nonces: int
    max_captured_tokens: int
    max_captured_nonces: int
    scratch_bytes: int
    fused: bool
    stages: int
    attention: list[str]
    experts: list[str]
    dtype: str
    kv_cache_dtype: str
    quantization: str
    flags: list[str]
    findings: list[str]
    refusal: str | None
    slower: NotRequired[str]
    passes: NotRequired[bool]
    late: NotRequired[bool]
    decode: NotRequired[DecodeFacts]


class Failure(TypedDict):
    """Any worker's answer in place of the others: one sentence.

    A worker never raises: vLLM would read the first rank's error and leave the answers of the other ranks
    to be taken for those of its next call, which may be chat's.
    """

    error: str
