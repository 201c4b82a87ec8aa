# SPDX-License-Identifier: Apache-2.0
"""What a pod is asked about its round: the requests that start its phases, and what all messages share.

The answers are in `vllm_poc.wire.answers`.

One body serves all protocols. ``r_target`` selects the distance protocol, ``params`` the artifact
protocol, and exactly one of them must be there. ``params.decode`` makes it the decode scheme of that protocol. Fields
after "ours" are additions to the protocol, which its clients may leave out and ignore.
"""

import re
from email.message import Message as Headed
from enum import StrEnum
from ipaddress import IPv6Address
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AnyHttpUrl,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from vllm_poc.wire.partition import MAX_NONCE, NonceSlot, refuse_ids_beyond_counts

#: Every PoC route of a pod starts with this path.
API_PREFIX = "/api/v1/pow"


def _refuse_bool(value: object) -> object:
    # JSON true would silently become the nonce 1.
    if isinstance(value, bool):
        raise ValueError("must be an integer, not a boolean")
    return value


#: A nonce as receivers store it: a signed 32-bit integer that is not negative.
Nonce = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0, le=MAX_NONCE)]

#: Longest text for people that one side stores of the other's.
MAX_TEXT = 500

#: Text for people, cut where it is longer: a status with a thousand of them must still fit.
ShortText = Annotated[str, AfterValidator(lambda text: text[:MAX_TEXT])]


def is_json(content_type: str) -> bool:
    """Return whether a Content-Type is of JSON: ``application/json`` or ``application/*+json``, with any parameters.

    Without one a body is JSON, too: the network's client sends none. Both servers refuse others with 415.
    """
    headed = Headed()
    headed["content-type"] = content_type
    subtype = headed.get_content_subtype()
    is_one = headed.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
    return is_one or not content_type.strip()


class Protocol(StrEnum):
    """What a round delivers per nonce: a distance, a vector (prefill scheme), or a chain (decode scheme)."""

    DISTANCE = "distance"
    ARTIFACT = "artifact"
    DECODE = "decode"


class Scheme(StrEnum):
    """The network's word for how artifacts are computed."""

    PREFILL = "prefill"
    DECODE = "decode"


def scheme_of(protocol: Protocol) -> Scheme | None:
    """Return the scheme of artifacts that a protocol stands for; None for distances."""
    return {Protocol.ARTIFACT: Scheme.PREFILL, Protocol.DECODE: Scheme.DECODE}.get(protocol)


class WireMessage(BaseModel):
    """Base of the messages. Unknown keys are ignored, as clients of the protocol rely on."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


#: Sequence length of the distance protocol where the request names none.
DEFAULT_DISTANCE_SEQ_LEN = 256
#: Batch size where the request names none.
DEFAULT_BATCH_SIZE = 32
#: Length of an artifact where the request names none.
DEFAULT_K_DIM = 12
#: Most decode steps of a nonce; the network takes 256.
MAX_TOKENS = 4_096
#: Value of ``node_id`` and ``node_count`` that were not told.
UNKNOWN = -1
#: Longest lease: a week.
MAX_LEASE_SECONDS = 7 * 86_400
LeaseSeconds = Annotated[int, Field(ge=1, le=MAX_LEASE_SECONDS)]
RoundId = Annotated[str, Field(min_length=1, max_length=253)]
#: Probability that an honest prover's distance falls on the other side of ``r_target``.
DEFAULT_P_FLIP = 5e-4

#: Index of a slot at which a round waits; the largest lies behind every slot's last nonce.
EndIndex = Annotated[int, Field(ge=0, le=MAX_NONCE + 1)]
#: Longest part of a host name.
_MAX_LABEL = 63
#: Longest callback address, without user and password; longest user and password; longest host name, as DNS has it.
MAX_CALLBACK_URL, _MAX_USER, MAX_HOST = 1024, 1024, 253
_LABEL = "[A-Za-z0-9_](?:[-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?"
_TOP_LABEL = "[A-Za-z_](?:[-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PORT = "(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
#: What a callback address looks like without user and password, in RE2's syntax, for the operator's API has it, too.
CALLBACK_URL = (
    rf"https?://(?:(?:{_LABEL}[.])*{_TOP_LABEL}|(?:{_OCTET}[.]){{3}}{_OCTET}|\[[0-9A-Fa-f:]+\])(?::{_PORT})?"
    r"(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*)?"
)
_USER = re.compile(rf"(https?://)(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{{2}}){{1,{_MAX_USER}}}@")
_HOST = re.compile(r"https?://(?:\[([^/\]]*)\]|([^/:]*))")


def check_callback_url(url: str) -> str:
    """Return the address. ValueError unless results can be posted to it; user and password are not part of it."""
    if len(url) > MAX_CALLBACK_URL:
        raise ValueError(f"has {len(url)} characters: use an address of at most {MAX_CALLBACK_URL}")
    for mark, part in (("#", "fragment"), ("?", "query")):
        _, found, rest = url.partition(mark)
        if found:
            message = f"has a {part} ({mark}{rest}): leave it out, since /generated is added to the address"
            raise ValueError(message)
    if host := _HOST.match(url):
        _check_host(address=host[1], name=host[2])
    if not re.fullmatch(CALLBACK_URL, url):
        message = (
            "must be an http:// or https:// URL with a host name or an IP address, and a port of 1 to 65535 if any"
        )
        raise ValueError(message)
    return url


def _check_host(*, address: str | None, name: str | None) -> None:
    if address is not None:
        _check_address(address)
    if name is not None:
        _check_name(name)


def _check_address(address: str) -> None:
    try:
        found = IPv6Address(address)
    except ValueError:
        raise ValueError(f"[{address}] is no IPv6 address: correct it") from None
    if found.ipv4_mapped is not None:
        raise ValueError(f"[{address}] is an IPv4 address: write it as {found.ipv4_mapped}")
    if found.scope_id is not None:
        raise ValueError(f"[{address}] has a zone, which says nothing on another host: use an address without one")


def _check_name(name: str) -> None:
    if len(name) > MAX_HOST:
        raise ValueError(f"the host name has {len(name)} characters: use one of at most {MAX_HOST}")
    labels = name.split(".")
    if not all(0 < len(label) <= _MAX_LABEL for label in labels):
        raise ValueError(f"{name} is no host name: its parts between dots have 1 to {_MAX_LABEL} characters")
    if not name.isascii() or any(label.lower().startswith("xn--") for label in labels):
        raise ValueError(f"{name} is an internationalised host name: use another name of the host")


def _check_pods_callback_url(url: object) -> object:
    if isinstance(url, str):  # anything else is refused as no URL
        check_callback_url(_USER.sub(r"\1", url, count=1) if _USER.match(url) else url)
    return url


#: Base of callbacks, with user and password where the receiver asks for them.
CallbackUrl = Annotated[AnyHttpUrl, BeforeValidator(_check_pods_callback_url)]
Probability = Annotated[float, Field(ge=0, le=1)]
#: Chains count blocks in int64.
MAX_BLOCK_HEIGHT = 2**63 - 1


class ArtifactParams(WireMessage):
    """``params`` of the artifact protocol. Unknown keys are refused, as the protocol says.

    ``decode`` and ``scheme`` both select the decode scheme, and ``max_tokens`` is its number of decode steps. The
    network sends ``decode`` alone, and neither of them in the prefill scheme: so it is passed on.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    seq_len: int = Field(ge=1)
    k_dim: int = Field(default=DEFAULT_K_DIM, ge=1)
    scheme: Scheme = Field(default=Scheme.PREFILL, exclude=True)
    decode: bool = False
    max_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS, validate_default=True)

    @field_validator("max_tokens")
    @classmethod
    def _steps_fit_the_scheme(cls, value: int, info: ValidationInfo) -> int:
        if not {"scheme", "decode"} <= info.data.keys():
            return value  # what is wrong with them is the one thing to tell
        decodes = info.data["decode"] or info.data["scheme"] is Scheme.DECODE
        if decodes and value < 1:
            # The reference computes a vector then that no validator accepts.
            raise ValueError("must be at least 1 in the decode scheme: send the number of decode steps")
        if value > 0 and not decodes:
            raise ValueError(f"{value} asks for decode steps, which the prefill scheme does not have: leave it out")
        return value

    @property
    def decodes(self) -> bool:
        """Whether the work is of the decode scheme."""
        return self.decode or self.scheme is Scheme.DECODE

    @model_serializer(mode="wrap")
    def _as_the_network_does(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told: dict[str, Any] = handler(self)
        if self.decodes:
            return told | {"decode": True}
        return {name: value for name, value in told.items() if name not in {"decode", "max_tokens"}}


class RoundRequest(WireMessage):
    """What all requests say about the round."""

    block_hash: str = Field(min_length=1, max_length=256)
    block_height: int = Field(ge=0, le=MAX_BLOCK_HEIGHT)
    public_key: str = Field(min_length=1, max_length=1024)
    # Artifact protocol.
    params: ArtifactParams | None = None
    # After ``params``, by which it is checked.
    batch_size: int = Field(default=DEFAULT_BATCH_SIZE, ge=0, le=65_536)
    poc_stronger_rng: bool = False
    # Distance protocol.
    r_target: float | None = Field(default=None, gt=0, le=2)
    seq_len: int | None = Field(default=None, ge=1)
    use_layer_hooks: bool = False
    use_sign_flips: bool | None = None
    # Ours, optional: who gave the order, so that he knows it again as his own.
    owner: str | None = Field(default=None, min_length=1, max_length=253)
    # Ours, optional: the id that makes a repeated request harmless.
    round_id: RoundId | None = None

    @field_validator("batch_size")
    @classmethod
    def _zero_is_of_chains(cls, value: int, info: ValidationInfo) -> int:
        if value or "params" not in info.data:
            return value  # what is wrong with params is the one thing to tell
        params = info.data["params"]
        if params is None or not params.decodes:
            raise ValueError("must be at least 1: only the decode scheme has 0, for as many as fit")
        return DEFAULT_BATCH_SIZE

    @model_validator(mode="after")
    def _exactly_one_protocol(self) -> Self:
        if (self.r_target is None) == (self.params is None):
            raise ValueError("set either r_target (distance protocol) or params (artifact protocol), not both")
        if self.params is not None and self.seq_len is not None:
            raise ValueError("seq_len belongs into params in the artifact protocol")
        return self

    @property
    def protocol(self) -> Protocol:
        """Which protocol the request is of."""
        if self.params is None:
            return Protocol.DISTANCE
        return Protocol.DECODE if self.params.decodes else Protocol.ARTIFACT

    @property
    def most_chains(self) -> int | None:
        """Most chains of a batch; None for as many as fit.

        Clients send the default, and smaller sizes, for the forward passes of vectors; so few chains would waste time.
        """
        return self.batch_size if self.batch_size > DEFAULT_BATCH_SIZE else None

    @property
    def max_tokens(self) -> int:
        """Decode steps per nonce; 0 in other protocols."""
        return self.params.max_tokens if self.params is not None else 0

    @property
    def effective_seq_len(self) -> int:
        """Tokens per nonce."""
        if self.params is not None:
            return self.params.seq_len
        return self.seq_len or DEFAULT_DISTANCE_SEQ_LEN

    @property
    def layer_hooks(self) -> bool:
        """Whether every decoder layer's output is reflected: always in the artifact protocol."""
        return self.params is not None or self.use_layer_hooks

    @property
    def sign_flips(self) -> bool:
        """Whether the last hidden state gets random signs: the distance protocol's alternative to hooks."""
        if self.params is not None:
            return False
        return not self.use_layer_hooks if self.use_sign_flips is None else self.use_sign_flips


class CallbackRequest(RoundRequest):
    """A request whose results go to a callback address."""

    # Callback base: `url` in the artifact protocol, `callback_url` in the distance protocol.
    url: CallbackUrl | None = None
    callback_url: CallbackUrl | None = None

    @model_validator(mode="after")
    def _one_url(self) -> Self:
        if self.url is not None and self.callback_url is not None:
            raise ValueError("set url or callback_url, not both")
        return self

    @property
    def receiver(self) -> str | None:
        """Callback base URL without a trailing slash, or None."""
        url = self.url or self.callback_url
        return str(url).rstrip("/") if url is not None else None


class SlotRequest(CallbackRequest):
    """A round on this server: its slot, and the test for what others claim to have computed."""

    node_id: int = Field(default=UNKNOWN, ge=UNKNOWN)
    node_count: int = Field(default=UNKNOWN, ge=UNKNOWN)
    group_id: int = Field(default=0, ge=0)
    n_groups: int = Field(default=1, ge=1)
    # Distance protocol: a p-value strictly below the threshold is fraud.
    fraud_threshold: Probability = 0.01
    # Ours, optional.
    p_mismatch: Probability = DEFAULT_P_FLIP
    # Ours, optional: resume at this index of the slot.
    start_index: int = Field(default=0, ge=0)
    # Ours, optional: compute no index from this one on, until POST extend moves it.
    end_index: EndIndex | None = None

    @model_validator(mode="after")
    def _slot_is_valid(self) -> Self:
        if not self.has_slot:
            return self
        refuse_ids_beyond_counts(self.node_id, self.node_count, self.group_id, self.n_groups)
        if self.start_index >= self.slot.capacity:
            raise ValueError(f"start_index {self.start_index} lies beyond the int32 range of the slot")
        if self.end_index is not None and self.end_index < self.start_index:
            raise ValueError(f"end_index {self.end_index} must not lie before start_index {self.start_index}")
        return self

    @property
    def has_slot(self) -> bool:
        """Whether the request says which nonces are to be computed."""
        return self.node_id != UNKNOWN and self.node_count > 0

    @property
    def slot(self) -> NonceSlot:
        """The residue class to compute. ValueError if the request names none."""
        return NonceSlot.model_validate(self, from_attributes=True)

    def same_work(self, other: "SlotRequest") -> bool:
        """Whether both ask for the same slot of the same round.

        Where they resume and pause may differ, and so may the owner, the lease, and user and password of the callback
        address.
        """
        skip: Any = {"owner", "start_index", "end_index", "lease_seconds", "url", "callback_url"}
        same_address = _without_user(self.receiver) == _without_user(other.receiver)
        return same_address and self.model_dump(exclude=skip) == other.model_dump(exclude=skip)


def _without_user(url: str | None) -> str | None:
    if url is None:
        return None
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class InitGenerateRequest(SlotRequest):
    """Start to compute the nonces of one slot until stopped."""

    node_id: int = Field(ge=0)
    node_count: int = Field(ge=1)
    # Ours, optional: stop when nobody has renewed the lease for so many seconds. Without it there is no lease.
    lease_seconds: LeaseSeconds | None = None


class InitRequest(SlotRequest):
    """Tell a distance round whose phases follow. Its slot may be left out if it will only validate."""

    @model_validator(mode="after")
    def _distance_protocol(self) -> Self:
        if self.protocol is not Protocol.DISTANCE:
            raise ValueError(
                "init and init/validate are of the distance protocol and need r_target; "
                "artifacts are validated by POST generate with validation"
            )
        return self


class ExtendRequest(WireMessage):
    """Body of ``POST extend``: let the round compute on, up to another index of its slot."""

    round_id: RoundId
    end_index: EndIndex


class LeaseRenewal(WireMessage):
    """Query of ``GET status``: whose lease it renews, if any, and for how long if not for as long as before."""

    renew_lease: RoundId | None = None
    lease_seconds: LeaseSeconds | None = None
