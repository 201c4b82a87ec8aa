# SPDX-License-Identifier: Apache-2.0
"""Artifacts on the wire: fp16 little-endian vectors in standard base64 with padding, or chains of indices.

In the decode scheme an artifact has one index for the prefill and one for each decode step. On the wire they are a JSON
array, and the vector is the empty string. The network's receiver, and ours, keep them as one byte each: a leaf.
"""

import base64
import binascii
import math
import struct
from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from vllm_poc.wire.messages import MAX_TOKENS, Nonce, WireMessage

_EXPONENT = 0x7C  # in the second byte of an fp16 number; all bits set in NaN and the infinities
_FINITE = bytes(byte for byte in range(256) if byte & _EXPONENT != _EXPONENT)

#: Points of the codebook: the indices of a chain lie in 0..15.
CODEBOOK_POINTS = 16
_POINTS = bytes(range(CODEBOOK_POINTS))


def _unpacked_alone(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    if not isinstance(value, bytes):
        return handler(value)
    return value if len(value) <= MAX_TOKENS + 1 else handler(list(value))


#: A claimed chain; an empty one is as good as none. A claim may hold any number: what is no index is a mismatch, not an
#: error. Our pods read one into bytes if each number fits into a byte: the garbage collector does not look at these.
Chain = Annotated[
    list[Annotated[int, Field(ge=-(2**63), lt=2**63)]],
    Field(max_length=MAX_TOKENS + 1),
    WrapValidator(_unpacked_alone),
]


class Artifact(TypedDict):
    """What the artifact protocol delivers for one nonce: a vector, or in the decode scheme ``k_points_steps``.

    A dictionary, since a message may have a hundred thousand: the garbage collector does not look at these.
    """

    nonce: Nonce
    vector_b64: str
    # Decode scheme.
    k_points_steps: NotRequired[Chain | None]
    # In its answers to ``generate``: steps that disagree with the reference (-1: nothing was compared), steps that were
    # not finite, and the largest margin of a disagreement.
    n_sphere_mismatches: NotRequired[int]
    n_nan_steps: NotRequired[int]
    mismatch_margin_max: NotRequired[float]


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


def chain_bytes(steps: Sequence[int] | None, max_tokens: int) -> bytes:
    """Return the leaf of a chain: one byte for the prefill and one for each of ``max_tokens`` steps.

    ValueError if it has another length, or a step that is no index of the codebook.
    """
    if not steps:
        raise ValueError("k_points_steps is missing, which every artifact of the decode scheme has")
    if len(steps) != max_tokens + 1:
        raise ValueError(f"k_points_steps has {len(steps)} steps, but max_tokens {max_tokens} takes {max_tokens + 1}")
    try:
        leaf = bytes(steps)
    except ValueError:
        leaf = b"\xff"
    if leaf.translate(None, _POINTS):
        place, wrong = next((at, step) for at, step in enumerate(steps) if not 0 <= step < CODEBOOK_POINTS)
        raise ValueError(f"k_points_steps holds {wrong} at step {place}: indices are 0 to {CODEBOOK_POINTS - 1}")
    return leaf


def chain_artifact(nonce: int, leaf: bytes) -> Artifact:
    """Return the artifact of a leaf, as the network's pods send it."""
    return Artifact(nonce=nonce, vector_b64="", k_points_steps=list(leaf))


def _format(k_dim: int) -> str:
    return f"<{k_dim}e"


def _refuse_not_finite(values: Sequence[float]) -> None:
    for position, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"vector holds {value} at position {position}: only finite numbers count")
