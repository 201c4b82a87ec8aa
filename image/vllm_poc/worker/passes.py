# SPDX-License-Identifier: Apache-2.0
"""How the served model computes for PoC: as vLLM's code says, or with fused operations that give the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from vllm_poc.worker.hooks import reflected_layers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm_poc.worker.internals import AttentionPlan, BatchShape, Runner


class Pass(Protocol):
    """A way to compute. ``needs_cache`` says whether its attention writes and reads a KV cache."""

    needs_cache: bool

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Describe a batch to the attention layers."""
        ...

    def workspace(self) -> object:
        """Return the memory that operations have worked in: whoever records them must keep it."""
        ...

    def applied(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> AbstractContextManager[None]:
        """Make the model compute this way while the context lasts, and reflect each layer's output along its vector.

        The forward pass returns all tokens, or the last of each sequence.
        """
        ...


class PlainPass:
    """vLLM's own forward pass, on any device, with hooks behind its layers."""

    needs_cache = True

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Describe a batch to the attention layers."""
        return self._runner.plan(shape)

    def workspace(self) -> object:
        """Return nothing: vLLM keeps its own."""
        return None

    @contextmanager
    def applied(self, vectors: Mapping[nn.Module, Tensor], shape: BatchShape) -> Iterator[None]:
        """Reflect each layer's output along its vector."""
        with reflected_layers(vectors):
            yield
