# SPDX-License-Identifier: Apache-2.0
"""What a delivery is checked against: the terms of its round."""

from dataclasses import dataclass
from typing import Self

from poc_operator.apis.v1alpha1.round import PoCRound
from vllm_poc.wire.messages import Protocol
from vllm_poc.wire.partition import NonceSlot


@dataclass(frozen=True, kw_only=True)
class RoundTerms:
    """A round as its PoCRound describes it. ``receiver`` is where its results are forwarded to, if anywhere."""

    uid: str
    namespace: str
    name: str
    block_hash: str
    block_height: int
    public_key: str
    protocol: Protocol
    k_dim: int | None
    r_target: float | None
    model: str
    seq_len: int
    node_count: int
    n_groups: int
    receiver: str | None

    @classmethod
    def of(cls, round_: PoCRound) -> Self:
        """Read the terms of a round whose slots are fixed."""
        spec, metadata = round_.spec, round_.metadata
        return cls(
            uid=metadata.uid,
            namespace=metadata.namespace,
            name=metadata.name,
            block_hash=spec.block_hash,
            block_height=spec.block_height,
            public_key=spec.public_key,
            protocol=spec.protocol,
            k_dim=spec.artifact.k_dim if spec.artifact is not None else None,
            r_target=float(spec.r_target) if spec.r_target is not None else None,
            model=spec.model.name,
            seq_len=spec.model.seq_len,
            node_count=spec.nodes.count,
            n_groups=round_.status.groups,
            receiver=spec.callback_url,
        )

    def slot(self, offset: int) -> NonceSlot:
        """Return the residue class whose first nonce is ``offset``."""
        group, node = divmod(offset, self.node_count)
        return NonceSlot(node_id=node, node_count=self.node_count, group_id=group, n_groups=self.n_groups)

    def offset_of(self, nonce: int) -> int:
        """Return the first nonce of the slot that ``nonce`` belongs to."""
        return nonce % (self.node_count * self.n_groups)
