# SPDX-License-Identifier: Apache-2.0
"""Settings of the PoC server, read from environment variables ``VLLM_POC_<NAME>``."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from vllm_poc.rpc import DecodeSetup

PREFIX = "VLLM_POC_"
_VALUE_ERROR = "Value error, "  # pydantic's prefix of messages that our validators raise
#: What is read of a file with a token: no header is longer.
_TOKEN_BYTES = 64 * 1024
_SENDABLE = re.compile(r"[!-~]+")
_MOUNT_IT = f"mount the Secret there, or set {PREFIX}TOKEN instead"
#: What Kubernetes adds to the environment for a Service whose name begins with ``vllm-poc``.
_SERVICE_LINK = re.compile(
    r".*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _split_commas(value: object) -> object:
    return _parts(value) if isinstance(value, str) else value


class Priority(StrEnum):
    """Who waits when chat and PoC both have work."""

    CHAT_FIRST = "chat-first"
    POC_FIRST = "poc-first"


class SettingsError(ValueError):
    """One sentence that names the variable and says what is wrong with it."""


class Settings(BaseModel):
    """Limits and times; the defaults suit a pod that serves chat beside PoC."""

    model_config = ConfigDict(frozen=True, alias_generator=lambda field: f"{PREFIX}{field.upper()}", extra="ignore")

    #: Bearer token that guards the PoC routes; none by default.
    token: SecretStr | None = Field(default=None, min_length=1)
    #: Path of a file that has this token instead, or several, separated by commas. It may change while the server runs.
    token_file: str | None = Field(default=None, min_length=1)
    #: Answer everybody who reaches the port, where neither PoC has a token nor vLLM has keys.
    open: bool = False
    #: Hosts that callbacks may go to, as patterns with ``*``. None: as `vllm_poc.server.admission.Access` has it.
    callback_allow: Annotated[tuple[str, ...] | None, BeforeValidator(_split_commas)] = Field(
        default=None, min_length=1
    )
    #: chat-first: PoC waits while chat has work. poc-first: PoC never waits, and new inference requests
    #: are answered 503 while a round computes; those that run already go on.
    priority: Priority = Priority.CHAT_FIRST
    #: With chat-first: least share of time that PoC gets however busy chat is, 0 for none and 1 for all.
    #: It is the share of the last ``share_window_seconds`` that slices took, from call to answer.
    min_share: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    #: Chat pauses for PoC's share no longer at a time than ``min_share`` of this and one slice.
    share_window_seconds: Seconds = 2.0
    #: A slice of PoC work aims to be no longer than this, so that chat waits little.
    slice_seconds: Seconds = 0.05
    #: Pause before PoC looks again whether chat has finished; it goes on after two looks in a row that found it idle.
    chat_backoff_seconds: Seconds = 0.005
    #: An engine call that takes longer ends the round in FAILED.
    engine_seconds: Seconds = 120.0
    #: A round ends in FAILED after this many NaN or infinite results without one clean slice in between.
    sick_nonces: int = Field(default=100, ge=1)
    #: Share of the time that requests beside a round get while it computes. It is the share of the last
    #: ``share_window_seconds`` that their slices took, from call to answer.
    request_share: float = Field(default=0.25, gt=0, le=1, allow_inf_nan=False)
    #: Most nonces that may wait or be computed of each kind of request, more being answered 429: ``generate`` that is
    #: queued, ``generate`` with ``wait``, and what goes beside a round, which is ``validate`` and ``beside_round``.
    queued_nonces: int = Field(default=100_000, ge=1)
    #: Results of queued work can be fetched, and their callbacks are tried, for this long.
    result_seconds: Seconds = 300.0
    #: Memory of such results, and of those that are still to be computed. When it is full, results that were fetched or
    #: delivered go first, and then further requests are answered 429. A single one may take more.
    result_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    #: A request that waits longer for its result is answered 503.
    request_seconds: Seconds = 600.0
    #: A request that does not wait for a round's end is answered 503 when the engine has not got to it for this long:
    #: no call to the workers was for it, or nothing is known of the model yet. Chat or other work keeps the engine busy
    #: then. To wait for a share of the time does not count.
    busy_seconds: Seconds = 60.0
    #: Generation is held back while this many results wait for delivery.
    pending_results: int = Field(default=50_000, ge=1)
    #: It is held back, too, while the results that wait take this much memory: a vector of 5 120 numbers has 14 KB.
    pending_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    #: Results in one callback.
    payload_results: int = Field(default=5_000, ge=1)
    #: Bytes of one callback, unless it has a single result. The gateway takes 16 MiB.
    payload_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    #: Least time between two callbacks, unless one is full.
    callback_interval_seconds: Seconds = 1.0
    #: One callback may take this long.
    callback_seconds: Seconds = 10.0
    #: Pause after a failed callback; doubles up to the limit below.
    retry_first_seconds: Seconds = 1.0
    retry_limit_seconds: Seconds = 30.0
    #: A receiver that answers 401, 403 or 404 is tried for this long, since it may have another token or route in a
    #: moment. After that such answers are final, until it accepts something. The gateway is tried for ever.
    refused_seconds: Seconds = 300.0
    #: ``stop`` waits this long for what is still to be delivered.
    flush_seconds: Seconds = 30.0
    #: A server that is told to end delivers what is left for at most this long first. Kubernetes kills a pod after
    #: 30 s, unless its ``terminationGracePeriodSeconds`` says otherwise.
    drain_seconds: Seconds = 20.0
    #: Largest request body.
    body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    #: Path of the network's codebook, `sphere_codebook.pt`. With it the server offers the decode scheme.
    decode_codebook: str | None = Field(default=None, min_length=1)
    #: Offer the decode scheme with a codebook that is made anew: for experiments alone, and every answer says so.
    decode_rebuild_codebook: bool = Field(default=False, validate_default=True)
    #: Bytes of the device's memory that are set aside for the keys and values of chains.
    decode_reserve_bytes: int = Field(default=0, ge=0, validate_default=True)

    @field_validator("token_file")
    @classmethod
    def _one_token(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("token") is not None:
            raise ValueError(f"there is a token by {PREFIX}TOKEN, too: leave one of them out")
        return value

    @field_validator("decode_rebuild_codebook")
    @classmethod
    def _one_codebook(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("decode_codebook") is not None:
            raise ValueError(f"there is a codebook by {PREFIX}DECODE_CODEBOOK, and one is to be made: leave one out")
        return value

    @field_validator("decode_reserve_bytes")
    @classmethod
    def _reserve_has_a_codebook(cls, value: int, info: ValidationInfo) -> int:
        if not {"decode_codebook", "decode_rebuild_codebook"} <= info.data.keys():
            return value  # what is wrong with them is the one thing to tell
        decodes = info.data["decode_codebook"] is not None or info.data["decode_rebuild_codebook"]
        if decodes and not value:
            raise ValueError("the decode scheme needs memory for keys and values: set the bytes to set aside")
        if value and not decodes:
            raise ValueError(f"is for the decode scheme: set {PREFIX}DECODE_CODEBOOK, too, or leave this out")
        return value

    @property
    def decode_setup(self) -> DecodeSetup | None:
        """What the workers need for the decode scheme; None if this server does not offer it."""
        if self.decode_codebook is None and not self.decode_rebuild_codebook:
            return None
        return DecodeSetup(
            codebook=self.decode_codebook,
            rebuild=self.decode_rebuild_codebook,
            reserve_bytes=self.decode_reserve_bytes,
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables that are set. SettingsError if one has a bad value, or is none of the settings."""
        cls._refuse_unknown(environment)
        try:
            return cls.model_validate(dict(environment))
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])  # the variable's, or the field's if that has its default
            variable = f"{PREFIX}{name.upper()}" if name in cls.model_fields else name
            raise SettingsError(f"{variable}: {first['msg'].removeprefix(_VALUE_ERROR)}.") from None

    @classmethod
    def _refuse_unknown(cls, environment: Mapping[str, str]) -> None:
        # With a misspelt VLLM_POC_TOKEN the server would answer vLLM's keys, or everybody if it is open.
        known = [f"{PREFIX}{field.upper()}" for field in cls.model_fields]
        for name in sorted(set(environment) - set(known)):
            if name.upper().startswith(PREFIX) and not _SERVICE_LINK.fullmatch(name):
                nearest = get_close_matches(name.upper(), known, n=1, cutoff=0)[0]
                raise SettingsError(f"{name} is not a setting: did you mean {nearest}? Correct it, or remove it.")


def read_tokens(path: str) -> tuple[str, ...]:
    """Return the tokens in a file, separated by commas. SettingsError if it has none, or cannot be read."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(_TOKEN_BYTES).decode()
    except OSError as error:
        raise SettingsError(f"{_cannot_be_read(path)} ({error.strerror}): {_MOUNT_IT}.") from None
    except ValueError:  # which quotes what it has read
        raise SettingsError(f"{_cannot_be_read(path)} (it is no text): {_MOUNT_IT}.") from None
    found = _parts(text)
    if not found:
        raise SettingsError(f"{PREFIX}TOKEN_FILE: {path} is empty: {_MOUNT_IT}.")
    if not all(_SENDABLE.fullmatch(token) for token in found):
        raise SettingsError(
            f"{PREFIX}TOKEN_FILE: {path} has a token that no header can have: leave out blanks and line breaks, and "
            "separate several tokens by commas."
        )
    return found


def _cannot_be_read(path: str) -> str:
    return f"{PREFIX}TOKEN_FILE: {path} cannot be read"
