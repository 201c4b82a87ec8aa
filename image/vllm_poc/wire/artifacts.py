# SPDX-License-Identifier: Apache-2.0
"""Artifacts on the wire: fp16 little-endian vectors in base64."""

from typing import Literal

from pydantic import Field

from vllm_poc.wire.base import Nonce, WireMessage


class Artifact(WireMessage):
    """What the artifact protocol delivers for one nonce."""

    nonce: Nonce
    vector_b64: str


class Encoding(WireMessage):
    """How the vectors are encoded."""

    dtype: Literal["f16"] = "f16"
    k_dim: int = Field(ge=1)
    endian: Literal["le"] = "le"
