# SPDX-License-Identifier: Apache-2.0
"""PoCRounds whose slots are fixed, and what pods deliver for them."""

import json
import struct
from base64 import b64encode
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from poc_operator.apis.v1alpha1.round import PoCRound

K_DIM = 12
R_TARGET = 1.4
MAX_TOKENS = 5
BLOCK_HASH, BLOCK_HEIGHT, PUBLIC_KEY = "ab" * 32, 7, "key"
#: aiohttp would label bytes as application/octet-stream.
JSON = {"Content-Type": "application/json"}
ROUND = {"block_hash": BLOCK_HASH, "block_height": BLOCK_HEIGHT, "public_key": PUBLIC_KEY}


def round_body(
    uid: str = "uid-1",
    *,
    groups: int = 1,
    nodes: int = 1,
    of_nodes: int | None = None,
    **spec: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """A PoCRound of the artifact protocol, with ``rTarget`` of the distance protocol, changed by ``spec``.

    The cluster serves the first ``nodes`` of ``of_nodes``, or all.
    """
    artifact = None if {"rTarget", "decode"} & spec.keys() else {"kDim": K_DIM}
    fields = {
        "blockHash": BLOCK_HASH,
        "blockHeight": BLOCK_HEIGHT,
        "publicKey": PUBLIC_KEY,
        "nodes": {"first": 0, "last": nodes - 1, "count": of_nodes or nodes},
        "artifact": artifact,
        "model": {"name": "demo", "seqLen": 64},
        "selector": {"matchLabels": {}},
        **spec,
    }
    metadata = {
        "name": f"round-{uid}",
        "namespace": "ns",
        "uid": uid,
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": datetime.now(UTC).isoformat(),
    }
    return {"metadata": metadata, "spec": fields, "status": {"slots": groups * nodes, "groups": groups}}


def a_round(uid: str = "uid-1", **changes: Any) -> PoCRound:  # noqa: ANN401
    """The same as one value."""
    return PoCRound.parse(round_body(uid, **changes))


def path(uid: str = "uid-1", end: str = "generated") -> str:
    """Where pods of the round deliver to."""
    return f"/callbacks/ns/round-{uid}/{uid}/{end}"


def vector(nonce: int, k_dim: int = K_DIM) -> bytes:
    """A vector that only this nonce has."""
    return struct.pack(f"<I{k_dim - 2}e", nonce & 0x3FFF3FFF, *(i / 8 for i in range(k_dim - 2)))


def encoded(nonce: int) -> str:
    """The same in base64."""
    return b64encode(vector(nonce)).decode()


def artifacts(nonces: Iterable[int], *, node: int = 0, **fields: Any) -> bytes:  # noqa: ANN401
    """What a pod delivers in the artifact protocol, with ``fields`` instead of the right ones."""
    items = [{"nonce": nonce, "vector_b64": encoded(nonce)} for nonce in nonces]
    message = {"node_id": node, "artifacts": items, "encoding": {"k_dim": K_DIM}, **ROUND, **fields}
    return json.dumps(message).encode()


def chain(nonce: int) -> list[int]:
    """A chain of the decode scheme that few other nonces have."""
    return [(nonce >> 4 * step) % 16 for step in range(MAX_TOKENS + 1)]


def chains(nonces: Iterable[int], *, node: int = 0, **fields: Any) -> bytes:  # noqa: ANN401
    """What a pod delivers in the decode scheme, with ``fields`` instead of the right ones."""
    items = [{"nonce": nonce, "vector_b64": "", "k_points_steps": chain(nonce)} for nonce in nonces]
    encoding = {"dtype": "f16", "k_dim": 12, "endian": "le"}
    return json.dumps({"node_id": node, "artifacts": items, "encoding": encoding, **ROUND, **fields}).encode()


def distances(pairs: Iterable[tuple[int, float]], **fields: Any) -> bytes:  # noqa: ANN401
    """What a pod delivers in the distance protocol."""
    nonces, values = zip(*pairs, strict=True)
    message = {"node_id": 0, "nonces": nonces, "dist": values, "r_target": R_TARGET, **ROUND, **fields}
    return json.dumps(message).encode()
