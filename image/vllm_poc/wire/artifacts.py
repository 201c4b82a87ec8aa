# SPDX-License-Identifier: Apache-2.0
"""Artifacts on the wire: fp16 little-endian vectors in standard base64 with padding."""

import base64
import binascii
import math
import struct
from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from vllm_poc.wire.messages import Nonce, WireMessage

_EXPONENT = 0x7C  # in the second byte of an fp16 number; all bits set in NaN and the infinities
_FINITE = bytes(byte for byte in range(256) if byte & _EXPONENT != _EXPONENT)


class Artifact(TypedDict):
    """What the artifact protocol delivers for one nonce.

    A dictionary, since a message may have a hundred thousand: the garbage collector does not look at these.
    """

    nonce: Nonce
    vector_b64: str


class Encoding(WireMessage):
    """How the vectors are encoded."""

    dtype: Literal["f16"] = "f16"
    k_dim: int = Field(ge=1)
    endian: Literal["le"] = "le"


def encode_vector(values: Sequence[float]) -> str:
    """Round ``values`` to fp16 (nearest even) and encode them; 12 numbers become 32 characters.

    ValueError if a value is not finite in fp16, whose largest number is 65504.
    """
    try:
        packed = struct.pack(_format(len(values)), *values)
    except OverflowError:
        raise ValueError("vector holds a value beyond the fp16 range of 65504: do not send it") from None
    _refuse_not_finite(values)
    return base64.b64encode(packed).decode("ascii")


def decode_vector(text: str, k_dim: int) -> tuple[float, ...]:
    """Return the ``k_dim`` numbers of ``text``; ValueError as for `vector_bytes`."""
    return struct.unpack(_format(k_dim), vector_bytes(text, k_dim))


def vector_bytes(text: str, k_dim: int) -> bytes:
    """Return the bytes of ``text``, which are ``k_dim`` fp16 numbers.

    ValueError if the text is not base64, has another length, or holds NaN or an infinity.
    """
    try:
        packed = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise ValueError(f"vector_b64 is not base64: {error}") from None
    if len(packed) != 2 * k_dim:
        raise ValueError(f"vector_b64 holds {len(packed)} bytes, but k_dim {k_dim} takes {2 * k_dim}")
    if packed[1::2].translate(None, _FINITE):
        _refuse_not_finite(struct.unpack(_format(k_dim), packed))
    return packed


def _format(k_dim: int) -> str:
    return f"<{k_dim}e"


def _refuse_not_finite(values: Sequence[float]) -> None:
    for position, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"vector holds {value} at position {position}: only finite numbers count")
