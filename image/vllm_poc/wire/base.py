# SPDX-License-Identifier: Apache-2.0
"""What all wire messages share."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

#: Every PoC route of a pod starts with this path.
API_PREFIX = "/api/v1/pow"


def _refuse_bool(value: object) -> object:
    # JSON true would silently become the nonce 1.
    if isinstance(value, bool):
        raise ValueError("must be an integer, not a boolean")
    return value


#: A nonce as receivers store it: a signed 32-bit integer that is not negative.
Nonce = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0, le=2**31 - 1)]


#: Longest text for people that one side stores of the other's.
MAX_TEXT = 500

#: Text for people, cut where it is longer: a status with a thousand of them must still fit.
ShortText = Annotated[str, AfterValidator(lambda text: text[:MAX_TEXT])]
#: Index of a slot's nonce, or a count of them.
Index = Annotated[int, Field(ge=0, le=2**31)]
#: Seconds, or a rate; large enough for any, small enough to add up.
Quantity = Annotated[float, Field(ge=0, le=1e12)]


class Protocol(StrEnum):
    """What a round delivers per nonce."""

    DISTANCE = "distance"
    ARTIFACT = "artifact"


class PowState(StrEnum):
    """State of the PoC server in a pod."""

    IDLE = "IDLE"
    GENERATING = "GENERATING"
    VALIDATING = "VALIDATING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class WireMessage(BaseModel):
    """Base of the messages. Unknown keys are ignored, as clients of the protocol rely on."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)
