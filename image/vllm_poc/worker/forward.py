# SPDX-License-Identifier: Apache-2.0
"""One PoC batch: seeded inputs, the served model's forward pass on scratch memory, results."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from vllm_poc.maths.inputs import fill_inputs
from vllm_poc.maths.reflections import layer_vectors
from vllm_poc.worker.batches import BatchRequest, BatchResult
from vllm_poc.worker.hooks import reflected_layers
from vllm_poc.worker.internals import BatchShape, Runner
from vllm_poc.worker.limits import Limits
from vllm_poc.worker.results import batch_result
from vllm_poc.worker.scratch import ScratchCache


class PocModel:
    """Computes PoC batches on the served model. Allocates the scratch cache once."""

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self._runner = runner
        self._limits = limits
        self._scratch = ScratchCache(
            runner.groups, max_nonces=limits.max_batch_nonces, max_tokens=limits.max_batch_tokens
        )
        self._vectors: tuple[str, Tensor] | None = None

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the scratch cache."""
        return self._scratch.nbytes

    def compute(self, request: BatchRequest) -> BatchResult:
        """Compute one batch. ValueError if it exceeds the limits that ``poc_describe`` tells."""
        shape = BatchShape(len(request["nonces"]), request["seq_len"])
        self._limits.check(shape)
        with torch.inference_mode():
            return batch_result(self._last_hidden(request, shape), request)

    def _last_hidden(self, request: BatchRequest, shape: BatchShape) -> Tensor:
        """Return the final norm's output at the last position of each nonce, ``[nonces, hidden]``."""
        embeddings = self._inputs(request, shape)
        plan = self._runner.plan(shape)
        with self._scratch.bound(), self._hooks(request):
            hidden = self._runner.forward(embeddings, plan)
        return hidden[:, -1]

    def _inputs(self, request: BatchRequest, shape: BatchShape) -> Tensor:
        size = (*shape, self._limits.hidden_size)
        embeddings = torch.empty(size, dtype=self._runner.dtype, device=self._runner.device)
        fill_inputs(
            embeddings,
            block_hash=request["block_hash"],
            public_key=request["public_key"],
            nonces=request["nonces"],
            strong_rng=request["strong_rng"],
        )
        return embeddings

    def _hooks(self, request: BatchRequest) -> AbstractContextManager[None]:
        if not request["layer_hooks"]:
            return nullcontext()
        return reflected_layers(self._runner.layers, self._layer_vectors(request["block_hash"]))

    def _layer_vectors(self, block_hash: str) -> Tensor:
        # A round has one block hash: keeping the last one's vectors is enough.
        if self._vectors is None or self._vectors[0] != block_hash:
            vectors = layer_vectors(
                block_hash=block_hash,
                num_layers=len(self._runner.layers),
                hidden=self._limits.hidden_size,
                device=self._runner.device,
            )
            self._vectors = (block_hash, vectors)
        return self._vectors[1]
