# SPDX-License-Identifier: Apache-2.0
"""The same numbers by a plain forward pass, without vLLM, paged attention or scratch memory."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.vllm.client import K_DIM, ROUND
from vllm_poc.maths.artifact import Selection, artifact_purposes, artifact_vectors
from vllm_poc.maths.distance import Transform, distance_purposes, distances, random_head, round_target
from vllm_poc.maths.sampling import fill_inputs, input_seeds, layer_vectors, nonce_seeds
from vllm_poc.worker.passes.plain import reflected_layers

BLOCK_HASH, PUBLIC_KEY = str(ROUND["block_hash"]), str(ROUND["public_key"])


class Reference:
    """The model in the transformers library, exact in float32 unless another dtype is asked for."""

    def __init__(self, folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype = torch.device(device), dtype
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).model.to(device)
        self._hidden = int(self.model.config.hidden_size)

    def inputs(self, nonces: Sequence[int], seq_len: int, *, strong_rng: bool = False) -> Tensor:
        """Return the seeded embeddings ``[nonces, seq_len, hidden]``."""
        out = torch.empty(len(nonces), seq_len, self._hidden, dtype=self._dtype, device=self._device)
        seeds = [input_seeds(BLOCK_HASH, PUBLIC_KEY, nonce, strong_rng=strong_rng) for nonce in nonces]
        fill_inputs(out, torch.tensor(seeds, device=self._device))
        return out

    def artifacts(self, inputs: Tensor, nonces: Sequence[int]) -> Tensor:
        """Return the artifacts ``[nonces, k_dim]``, with every layer's output reflected."""
        vectors = layer_vectors(
            block_hash=BLOCK_HASH,
            num_layers=len(self.model.layers),
            hidden=self._hidden,
            device=self._device,
        )
        with reflected_layers(dict(zip(self.model.layers, vectors, strict=True))):
            last = self._last_hidden(inputs)
        seeds = self._seeds(nonces, artifact_purposes(K_DIM))
        return artifact_vectors(last, Selection.of(seeds, hidden=self._hidden))

    def distances(self, inputs: Tensor, nonces: Sequence[int]) -> Tensor:
        """Return the distances ``[nonces]``, with sign flips and without layer hooks."""
        last = self._last_hidden(inputs)
        head = random_head(BLOCK_HASH, self._hidden, self._device)
        seeds = self._seeds(nonces, distance_purposes(sign_flips=True))
        transform = Transform.of(seeds, hidden=self._hidden)
        return distances(last, transform, head, round_target(BLOCK_HASH, self._device))

    def _seeds(self, nonces: Sequence[int], purposes: Sequence[str]) -> Tensor:
        rows = [nonce_seeds(BLOCK_HASH, PUBLIC_KEY, nonce, purposes) for nonce in nonces]
        return torch.tensor(rows, device=self._device)

    def _last_hidden(self, inputs: Tensor) -> Tensor:
        with torch.inference_mode():
            hidden: Tensor = self.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return hidden[:, -1]
