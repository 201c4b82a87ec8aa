# SPDX-License-Identifier: Apache-2.0
"""The same numbers by a plain forward pass, without vLLM, paged attention or scratch memory."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.vllm.client import K_DIM, ROUND
from vllm_poc.maths.artifact import artifact_vectors
from vllm_poc.maths.distance import distances
from vllm_poc.maths.inputs import fill_inputs
from vllm_poc.maths.reflections import layer_vectors
from vllm_poc.worker.hooks import reflected_layers

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
        fill_inputs(out, block_hash=BLOCK_HASH, public_key=PUBLIC_KEY, nonces=nonces, strong_rng=strong_rng)
        return out

    def artifacts(self, inputs: Tensor, nonces: Sequence[int]) -> Tensor:
        """Return the artifacts ``[nonces, k_dim]``, with every layer's output reflected."""
        vectors = layer_vectors(
            block_hash=BLOCK_HASH,
            num_layers=len(self.model.layers),
            hidden=self._hidden,
            device=self._device,
        )
        with reflected_layers(list(self.model.layers), vectors):
            last = self._last_hidden(inputs)
        return artifact_vectors(last, block_hash=BLOCK_HASH, public_key=PUBLIC_KEY, nonces=nonces, k_dim=K_DIM)

    def distances(self, inputs: Tensor, nonces: Sequence[int]) -> Tensor:
        """Return the distances ``[nonces]``, with sign flips and without layer hooks."""
        last = self._last_hidden(inputs)
        return distances(last, block_hash=BLOCK_HASH, public_key=PUBLIC_KEY, nonces=nonces, sign_flips=True)

    def _last_hidden(self, inputs: Tensor) -> Tensor:
        with torch.inference_mode():
            hidden: Tensor = self.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return hidden[:, -1]
