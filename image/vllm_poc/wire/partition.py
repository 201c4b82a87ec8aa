# SPDX-License-Identifier: Apache-2.0
"""Which nonces a worker computes.

The nonces of a round are split into ``node_count * n_groups`` residue classes. A worker owns one
class, called a slot here: two workers never compute the same nonce if their (node, group) pairs
differ **and** they were told the same counts. That is why the counts are fixed for a round's life.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: Receivers store a nonce as a signed 32-bit integer.
MAX_NONCE = 2**31 - 1


def refuse_ids_beyond_counts(node_id: int, node_count: int, group_id: int, n_groups: int) -> None:
    """Raise ValueError unless each id lies below its count."""
    if node_id >= node_count:
        raise ValueError(f"node_id {node_id} must be below node_count {node_count}")
    if group_id >= n_groups:
        raise ValueError(f"group_id {group_id} must be below n_groups {n_groups}")


class NonceSlot(BaseModel):
    """One residue class of nonces: group ``group_id`` of node ``node_id``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node_id: int = Field(ge=0)
    node_count: int = Field(ge=1)
    group_id: int = Field(default=0, ge=0)
    n_groups: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ids_lie_below_their_counts(self) -> Self:
        refuse_ids_beyond_counts(self.node_id, self.node_count, self.group_id, self.n_groups)
        return self

    @property
    def offset(self) -> int:
        """First nonce of the slot."""
        return self.node_id + self.group_id * self.node_count

    @property
    def stride(self) -> int:
        """Distance between neighbouring nonces of the slot; the number of slots of the round."""
        return self.node_count * self.n_groups

    def nonce(self, index: int) -> int:
        """Return nonce number ``index`` (0, 1, 2, …) of the slot."""
        return self.offset + index * self.stride

    def nonces(self, start: int, count: int) -> list[int]:
        """Return up to ``count`` nonces from index ``start`` on; fewer where the int32 range ends."""
        last = min(start + count, self.capacity)
        return [self.nonce(index) for index in range(start, last)]

    @property
    def capacity(self) -> int:
        """How many nonces of the slot fit into int32."""
        return max(0, (MAX_NONCE - self.offset) // self.stride + 1)

    def index(self, nonce: int) -> int:
        """Return the index of ``nonce`` in the slot; ValueError if it belongs to another slot."""
        index, rest = divmod(nonce - self.offset, self.stride)
        if rest or index < 0:
            raise ValueError(f"nonce {nonce} is not in the slot {self.offset} + x * {self.stride}")
        return index
