# SPDX-License-Identifier: Apache-2.0
"""Chains of the decode scheme without vLLM and without a KV cache: each step reads the whole sequence anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.unit.vllm_poc.maths import decode_oracle as oracle
from tests.vllm.reference import BLOCK_HASH, PUBLIC_KEY, Reference
from vllm_poc.maths.decode import rebuild_codebook
from vllm_poc.maths.sampling import layer_vectors, normal
from vllm_poc.worker.passes.plain import reflected_layers


class Chain(NamedTuple):
    """The index of each step, and the scores of all points there."""

    points: list[int]
    scores: list[list[float]]

    def margins(self, claims: Sequence[int]) -> list[float]:
        """Return how far each claimed point scores below the best one; 2.0 where there is no such point."""
        return [
            max(scores) - scores[claim] if 0 <= claim < len(scores) else 2.0
            for scores, claim in zip(self.scores, claims, strict=False)
        ]


class DecodeReference(Reference):
    """The model in the transformers library, in float32."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._codebook = rebuild_codebook().tolist()

    def chain(self, nonce: int, seq_len: int, max_tokens: int, claims: Sequence[int] = ()) -> Chain:
        """Return the chain of a nonce, whose steps go on from the claims of the steps before, where there are any."""
        base = oracle.text_seed(f"{BLOCK_HASH}_{PUBLIC_KEY}_nonce{nonce}")
        first = oracle.text_seed(f"{BLOCK_HASH}_{PUBLIC_KEY}_nonce_{nonce}_pick_256_decode0")
        rows, chain = self.inputs([nonce], seq_len), Chain([], [])
        for step in range(max_tokens + 1):
            seed = first
            if step:
                previous = claims[step - 1] if step <= len(claims) else chain.points[-1]
                seed = oracle.step_seed(base, previous, step, 0x91)
                row = normal(torch.tensor(oracle.step_seed(base, previous, step, 0x0D)), self._hidden)
                rows = torch.cat((rows, row.view(1, 1, -1)), dim=1)
            scores = oracle.scores(self._hidden_state(rows, nonce, seq_len), self._picks(seed), self._codebook)
            chain.points.append(scores.index(max(scores)))
            chain.scores.append(scores)
        return chain

    def change_weights(self) -> None:
        """Give each layer's attention the weights of another model."""
        for layer in self.model.layers:
            weight = layer.self_attn.o_proj.weight
            weight.data = weight.roll(1, 0)

    def _picks(self, seed: int) -> list[int]:
        *smaller, last = oracle.picks_in_hash_order(seed, self._hidden)
        return [*sorted(smaller), last]

    def _hidden_state(self, rows: Tensor, nonce: int, seq_len: int) -> list[float]:
        vectors = layer_vectors(
            block_hash=BLOCK_HASH, num_layers=len(self.model.layers), hidden=self._hidden, device=self._device
        )
        with reflected_layers(dict(zip(self.model.layers, vectors, strict=True))), self._seeded(nonce, seq_len):
            state: list[float] = self._last_hidden(rows)[0].tolist()
        return state

    @contextmanager
    def _seeded(self, nonce: int, seq_len: int) -> Iterator[None]:
        """Let routers choose as the scheme says: the tokens of the prefill as step 0, each later one as its step."""
        gates = [gate for layer in self.model.layers if (gate := getattr(layer.mlp, "gate", None)) is not None]
        with ExitStack() as stack:
            for number, gate in enumerate(gates):
                seed = oracle.text_seed(f"{BLOCK_HASH}_n{nonce}_route_layer_{number}")
                stack.enter_context(gate.register_forward_hook(_Router(seed, seq_len)))
            yield


class _Router:
    """Takes the place of what transformers' router gives: logits, weights and experts of each token."""

    def __init__(self, seed: int, seq_len: int) -> None:
        self._seed = seed
        self._seq_len = seq_len

    def __call__(
        self, gate: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        experts, top_k = int(gate.num_experts), int(gate.top_k)
        steps = [max(0, position - self._seq_len + 1) for position in range(len(output[0]))]
        starts = [oracle.murmur(step, self._seed) % experts for step in steps]
        logits = torch.tensor([oracle.route_logits(start, experts, top_k) for start in starts], dtype=torch.float32)
        weights, chosen = logits.softmax(dim=-1).topk(top_k, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), chosen
