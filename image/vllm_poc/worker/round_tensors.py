# SPDX-License-Identifier: Apache-2.0
"""What all nonces of a block hash share on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_poc.maths.distance import OUTPUT_DIM, random_head, round_target
from vllm_poc.maths.reflections import layer_vectors
from vllm_poc.wire.messages import Protocol
from vllm_poc.worker.recipe import Recipe


class RoundTensors:
    """Reflection vectors, random head and target of the block hash that was loaded last.

    Their addresses never change, since CUDA graphs read them. ``layers`` are those of all stages.
    """

    def __init__(self, *, layers: int, hidden: int, device: torch.device) -> None:
        self.vectors = torch.zeros(layers, hidden, device=device)
        self._hidden = hidden
        self._device = device
        self._vectors_of: str | None = None
        self._head_of: str | None = None
        self._head: tuple[Tensor, Tensor] | None = None

    @property
    def head_and_target(self) -> tuple[Tensor, Tensor]:
        """The random head ``[8192, hidden]``, of which only distances need one, and the target ``[8192]``."""
        if self._head is None:
            head = torch.zeros(OUTPUT_DIM, self._hidden, device=self._device)
            self._head = head, torch.zeros(OUTPUT_DIM, device=self._device)
        return self._head

    def load(self, block_hash: str, recipe: Recipe, *, results: bool) -> None:
        """Make what the recipe needs that of ``block_hash``; head and target only if this stage makes ``results``."""
        if recipe.layer_hooks and self._vectors_of != block_hash:
            layers = len(self.vectors)
            same = {"hidden": self._hidden, "device": self._device}
            self.vectors.copy_(layer_vectors(block_hash=block_hash, num_layers=layers, **same))
            self._vectors_of = block_hash
        if results and recipe.protocol is Protocol.DISTANCE and self._head_of != block_hash:
            head, target = self.head_and_target
            head.copy_(random_head(block_hash, self._hidden, self._device))
            target.copy_(round_target(block_hash, self._device))
            self._head_of = block_hash
