# SPDX-License-Identifier: Apache-2.0
"""Settings of the PoC server, read from environment variables ``VLLM_POC_<NAME>``."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def _variable(field: str) -> str:
    return f"VLLM_POC_{field.upper()}"


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


class Settings(BaseModel):
    """Limits and times; the defaults suit a pod that serves chat beside PoC."""

    model_config = ConfigDict(frozen=True, alias_generator=_variable, extra="ignore")

    #: Bearer token that guards the PoC routes; none by default.
    token: SecretStr | None = Field(default=None, min_length=1)
    #: Hosts that callbacks may go to, as patterns with ``*``.
    callback_allow: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = Field(default=("*",), min_length=1)
    #: A slice of PoC work aims to be no longer than this, so that chat waits little.
    slice_seconds: Seconds = 0.05
    #: Pause before PoC looks again whether chat has finished.
    chat_backoff_seconds: Seconds = 0.05
    #: An engine call that takes longer ends the round in FAILED.
    engine_seconds: Seconds = 120.0
    #: A ``generate`` request that takes longer is answered 503.
    request_seconds: Seconds = 600.0
    #: Generation is held back while this many results wait for delivery.
    pending_results: int = Field(default=50_000, ge=1)
    #: Results in one callback.
    payload_results: int = Field(default=5_000, ge=1)
    #: Least time between two callbacks, unless one is full.
    callback_interval_seconds: Seconds = 1.0
    #: One callback may take this long.
    callback_seconds: Seconds = 10.0
    #: Pause after a failed callback; doubles up to the limit below.
    retry_first_seconds: Seconds = 1.0
    retry_limit_seconds: Seconds = 30.0
    #: ``stop`` waits this long for what is still to be delivered.
    flush_seconds: Seconds = 30.0
    #: Largest request body.
    body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables that are set; pydantic.ValidationError names the variable that is wrong."""
        return cls.model_validate(dict(environment))

    def allows_callback_to(self, host: str) -> bool:
        """Whether callbacks may go to ``host``."""
        return any(fnmatchcase(host.lower(), pattern.lower()) for pattern in self.callback_allow)
