# SPDX-License-Identifier: Apache-2.0
"""What the routes are asked with. A parameter that does not exist is refused: a filter misspelt must not be ignored."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from vllm_poc.wire.messages import Nonce

#: Most entries of one page.
PAGE_LIMIT = 1_000
#: Most proofs of one sample.
SAMPLE_LIMIT = 10_000


class Format(StrEnum):
    """How artifacts are written."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


def _milliseconds(value: object) -> object:
    if not isinstance(value, str) or value.isdecimal():
        return value
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError("must be milliseconds since 1970, or RFC 3339 with a time zone as in 2026-01-31T08:00:00Z")
    return int(moment.timestamp() * 1000)


#: A moment in milliseconds since 1970, as the database has it.
Moment = Annotated[int, BeforeValidator(_milliseconds), Field(ge=0, lt=2**63)]


class _Parameters(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Page(_Parameters):
    #: ``next`` of the page before.
    after: int | None = Field(default=None, ge=0, lt=2**63)
    limit: int = Field(default=100, ge=1, le=PAGE_LIMIT)


class RoundsQuery(_Page):
    """Which rounds."""

    namespace: str | None = None
    name: str | None = None
    block_hash: str | None = None


class RoundQuery(_Parameters):
    """Which round of a name; the newest without ``uid``."""

    uid: str | None = None


class ConflictsQuery(_Page, RoundQuery):
    """Which conflicts of a round."""


class SampleQuery(RoundQuery):
    """How many proofs, and the text that decides which."""

    nonces: int = Field(default=200, ge=1, le=SAMPLE_LIMIT)
    seed: str = Field(default="", max_length=256)


class ArtifactsQuery(RoundQuery):
    """Which artifacts, and how they are written.

    ``from`` and ``nonce_from`` are included, so is ``nonce_to``; ``to`` is not. ``below`` keeps the distances below it:
    what would be valid if it were the target.
    """

    format: Format | None = None
    slot: int | None = None
    since: Moment | None = Field(default=None, alias="from")
    until: Moment | None = Field(default=None, alias="to")
    nonce_from: Nonce = 0
    nonce_to: Nonce = 2**31 - 1
    below: float | None = Field(default=None, gt=0)
    limit: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_ranges(self) -> Self:
        if self.nonce_from > self.nonce_to:
            raise ValueError(f"nonce_from {self.nonce_from} is above nonce_to {self.nonce_to}: swap them")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError("from is not before to: swap them")
        return self
