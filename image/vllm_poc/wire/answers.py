# SPDX-License-Identifier: Apache-2.0
"""What a pod answers: its round's status, the answers to commands, its GPUs, and errors.

The gateway answers the network with the same status and the same errors. Fields after "ours" are additions to the
protocol, which its clients may ignore.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from vllm_poc.wire.messages import Protocol, Scheme, ShortText, WireMessage

#: Index of a slot's nonce, or a count of them.
Index = Annotated[int, Field(ge=0, le=2**31)]
#: Seconds, or a rate; large enough for any, small enough to add up.
Quantity = Annotated[float, Field(ge=0, le=1e12)]


class PowState(StrEnum):
    """State of the PoC server in a pod."""

    IDLE = "IDLE"
    GENERATING = "GENERATING"
    VALIDATING = "VALIDATING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class Activity(StrEnum):
    """What a round that generates does now, for programs. A client must expect other words."""

    COMPUTING = "Computing"
    HELD_BY_CHAT = "HeldByChat"  # requests of vLLM's users come first
    WAITING_FOR_EXTENSION = "WaitingForExtension"  # it has reached its end_index
    RECEIVER_FULL = "ReceiverFull"  # so many results wait for their receiver that no more are computed
    PAUSED = "Paused"  # vLLM sleeps, is paused, or gets new weights
    DELIVERING = "Delivering"  # all is computed


class StopReason(StrEnum):
    """Why a round was stopped, for programs. A client must expect other words."""

    REQUESTED = "Requested"  # by a call
    PREEMPTED = "Preempted"  # by a call, for a round that goes first
    SLOT_DONE = "SlotDone"  # the slot's last nonce is delivered
    LEASE_EXPIRED = "LeaseExpired"  # nobody renewed its lease
    SERVER_ENDS = "ServerEnds"


SessionId = Annotated[str, Field(max_length=256)]


class RoundConfig(WireMessage):
    """The round that runs, as it was requested."""

    block_hash: str
    block_height: int
    public_key: str
    node_id: int
    node_count: int
    group_id: int
    n_groups: int
    seq_len: int
    k_dim: int | None = None
    # Ours.
    protocol: Protocol
    # Artifact protocol; null in the distance protocol. ``max_tokens`` counts decode steps, null without any.
    scheme: Scheme | None = None
    max_tokens: int | None = None
    model: str | None = None
    batch_size: int
    url: str | None = None
    poc_stronger_rng: bool = False
    use_layer_hooks: bool = False
    use_sign_flips: bool = False


class RoundStats(WireMessage):
    """Progress in the artifact protocol's words."""

    total_processed: Index = 0
    nonces_per_second: Quantity = 0.0


class ModelLimits(WireMessage):
    """What the served model allows; lets a client say what is wrong before it asks.

    ``scratch_bytes`` is the device memory of PoC's own KV cache on the rank that has most, ``fused`` whether PoC's
    forward pass is faster than vLLM's own. ``attention`` and ``experts`` are vLLM's names of the kernels that compute
    these; with others, results differ as those of another GPU do. So they do with another ``dtype``,
    ``kv_cache_dtype`` or ``quantization``, in vLLM's words, and may with other ``flags`` of vLLM. A forward pass that
    was not tuned has at most ``max_batch_tokens``, and ``max_batch_nonces``. ``findings`` are sentences about what the
    server found out about itself before it computed; its log has the same. ``rebuilt_codebook`` is that of
    `VersionsResponse`.
    """

    names: list[ShortText] = Field(default_factory=list)
    max_seq_len: int = Field(default=0, ge=0)
    hidden_size: int = Field(default=0, ge=0)
    scratch_bytes: int = Field(default=0, ge=0)
    fused: bool = False
    attention: ShortText = ""
    experts: ShortText = ""
    dtype: ShortText = ""
    kv_cache_dtype: ShortText = ""
    quantization: ShortText = ""
    flags: list[ShortText] = Field(default_factory=list)
    max_batch_tokens: int = Field(default=0, ge=0)
    max_batch_nonces: int = Field(default=0, ge=0)
    findings: list[ShortText] = Field(default_factory=list)
    rebuilt_codebook: bool = False
    # Why the engine could not say, or why PoC does not run on this model.
    error: ShortText | None = None


class StatusResponse(WireMessage):
    """``GET status``, for both protocols.

    Times are seconds, rates are nonces per second. ``next_index`` is the first index of the slot
    that was not computed yet; ``delivered_index`` the first that the receiver has not accepted
    yet: a restart from there loses nothing. ``delivered_valid`` and ``delivered_rejected`` count the
    valid and the rejected nonces from ``start_index`` up to ``delivered_index``. Rejected is a nonce
    whose result is not finite or whose delivery the receiver refused for good (4xx). At ``end_index`` the
    round waits to be extended; null if it goes on to the end of its slot.

    ``lease_seconds`` is the lease that the round was started with, ``lease_remaining_seconds`` how long it lasts if
    nobody renews it; both are null without one, and when no round generates. ``stop_reason``, a word of `StopReason`,
    and ``stop_message``, a sentence, are about a round that was stopped.

    ``status`` and ``state`` differ in one case: after a stop the artifact protocol's clients expect
    IDLE in ``status``, the distance protocol's STOPPED in ``state``. The counters stay readable until
    the next start. ``valid_nonces`` and ``valid_distances`` hold the newest of a long round only.
    """

    status: PowState
    config: RoundConfig | None = None
    stats: RoundStats | None = None
    # Distance protocol.
    state: PowState
    valid_nonces: list[int] = Field(default_factory=list)
    valid_distances: list[float] = Field(default_factory=list)
    total_checked: Index = 0
    total_valid: Index = 0
    elapsed_seconds: Quantity = 0.0
    rate_per_second: Quantity = 0.0
    r_target: float | None = None
    # Ours.
    session_id: SessionId
    round_id: str | None = None
    owner: ShortText | None = None
    next_index: Index = 0
    delivered_index: Index = 0
    start_index: Index = 0
    end_index: Index | None = None
    delivered_valid: Index = 0
    delivered_rejected: Index = 0
    rejected: Index = 0
    last_progress_seconds: Quantity | None = None
    held_back_seconds: Quantity = 0.0
    # A word of `Activity`; null if no round generates.
    activity: ShortText | None = None
    # Why nothing is computed: vLLM sleeps, is paused, or gets new weights.
    paused_by: ShortText | None = None
    stop_reason: ShortText | None = None
    stop_message: ShortText | None = None
    # Whether the server knows leases; earlier ones do not.
    leases: bool = False
    lease_seconds: Index | None = None
    lease_remaining_seconds: Quantity | None = None
    # Why the round FAILED, and what the callback receiver last answered while deliveries fail.
    error: ShortText | None = None
    delivery_error: ShortText | None = None
    # Whether the gateway refuses the callback address as not valid now. A repeated start may bring another one.
    callback_unauthorized: bool = False
    # Callbacks of queued work and of verdicts: on their way, and rejected or given up since the server's start.
    callbacks_pending: int = 0
    callbacks_lost: int = 0
    model: ModelLimits = Field(default_factory=ModelLimits)


class PowStatus(WireMessage):
    """The state after a call that changed it."""

    status: PowState
    session_id: SessionId
    round_id: str | None = None
    next_index: Index = 0
    delivered_index: Index = 0


class CommandResponse(WireMessage):
    """Answer to every call that changes the state."""

    status: Literal["OK"] = "OK"
    pow_status: PowStatus


class VersionsResponse(WireMessage):
    """``GET versions``. Servers without this route abort inference when they validate."""

    vllm_version: str
    poc_validation_inference: Literal[True] = True
    # Ours.
    protocols: list[Protocol]
    #: Of the artifact protocol. A client that needs another scheme knows before it orders work.
    schemes: list[Scheme]
    #: Whether chains of the decode scheme are of a codebook that is not the network's: an experiment.
    rebuilt_codebook: bool = False


class FieldError(WireMessage):
    """One thing wrong with a request."""

    field: str
    message: str


class ErrorResponse(WireMessage):
    """Body of every 4xx and 5xx answer. ``detail`` is the sentence for people."""

    detail: ShortText
    # CamelCase word for programs: RoundConflict, ModelMismatch, SequenceTooLong, InvalidRequest, ...
    reason: ShortText
    errors: list[FieldError] = Field(default_factory=list)
    # With RoundConflict: what runs instead.
    running: RoundConfig | None = None
    round_id: str | None = None


#: More GPUs than any machine has.
MAX_GPUS = 64

Reading = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=2**63)]


class Gpu(WireMessage):
    """One GPU, by its index in the pod. Null is what it, its driver or NVML does not tell, and ``error`` says why
    nothing else is known of it.

    Sizes are bytes, temperatures °C, powers watts, clocks hertz. ``clocks_event_reasons`` are NVML's bits for what
    keeps the clock down. Errors of the memory are counted over the GPU's life, replays since the driver was loaded.
    ``xid_errors`` counts what the driver calls Xid errors since somebody first asked this server, without those that
    programs cause; ``last_xid`` is the number of the last one.
    """

    index: int = Field(ge=0, lt=MAX_GPUS)
    name: ShortText | None = None
    memory_total_bytes: Count | None = None
    memory_free_bytes: Count | None = None
    memory_used_bytes: Count | None = None
    utilization_percent: Reading | None = None
    temperature_celsius: Reading | None = None
    memory_temperature_celsius: Reading | None = None
    power_watts: Reading | None = None
    power_limit_watts: Reading | None = None
    sm_clock_hertz: Reading | None = None
    sm_clock_max_hertz: Reading | None = None
    clocks_event_reasons: Count | None = None
    ecc_double_bit_errors: Count | None = None
    pcie_replays: Count | None = None
    xid_errors: Count | None = None
    last_xid: Count | None = None
    error: ShortText | None = None


class GpusResponse(WireMessage):
    """The GPUs that the pod sees: none on a CPU, or without NVML; and the versions of what tells of them."""

    devices: list[Gpu] = Field(default_factory=list, max_length=MAX_GPUS)
    driver_version: ShortText | None = None
    cuda_driver_version: ShortText | None = None
    nvml_version: ShortText | None = None
