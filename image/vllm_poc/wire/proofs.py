# SPDX-License-Identifier: Apache-2.0
"""``POST validate`` of the distance protocol: distances that someone claims, and the verdict on them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from vllm_poc.wire.base import WireMessage
from vllm_poc.wire.generate import Nonces, refuse_duplicates
from vllm_poc.wire.results import Verdict


class ProofBatch(WireMessage):
    """What a prover sent to its receiver.

    The recomputation takes the public key from here and everything else from this server's round, so that a
    batch of another block is found out. ``block_hash``, ``block_height`` and ``node_id`` are the sender's
    words and are not used.
    """

    public_key: str = Field(min_length=1, max_length=1024)
    block_hash: str
    block_height: int
    node_id: int = 0
    nonces: Nonces
    #: One for each nonce, in the same order.
    dist: list[float]

    @model_validator(mode="after")
    def _lists_run_parallel(self) -> Self:
        refuse_duplicates("nonces", self.nonces)
        if len(self.dist) != len(self.nonces):
            raise ValueError(f"dist has {len(self.dist)} entries for {len(self.nonces)} nonces: send one for each")
        return self


class ProofVerdict(Verdict):
    """The answer. ``computed_distances`` runs parallel to the batch's nonces, null where not computed."""

    status: Literal["OK"] = "OK"
    computed_distances: list[float | None]
