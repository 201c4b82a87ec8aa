# SPDX-License-Identifier: Apache-2.0
"""A worker extension that lets vLLM's own engine compute a nonce, as a prompt among chats."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack, suppress

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader import dummy_loader

from tests.vllm.worker_checks import CheckingExtension
from vllm_poc.maths.artifact import Selection, artifact_purposes, artifact_vectors
from vllm_poc.maths.sampling import fill_inputs, input_seeds, layer_vectors, nonce_seeds, token_ids, token_seed
from vllm_poc.worker.passes.plain import reflected_layers

with suppress(ImportError):  # releases that have no such model
    from vllm.models.deepseek_v4.cpu import cpu_mla

    # vLLM 0.32.0 asks this one for kinds of layers that it does not list: chat fails, too. None stands for "no plan".
    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda *_: defaultdict(lambda: None)


_generators = dict[torch.device, torch.Generator]()
_vllms_own = dummy_loader.initialize_single_dummy_weight


def _sensible(values: Tensor, *_: object, **__: object) -> None:
    """Give a weight a size by which signals keep theirs.

    vLLM's own dummy weights are next to nothing. Attention would not show, and on a CPU nobody can change the weights
    of linear layers once they are loaded: kernels have them in a form of their own.
    """
    if not values.is_floating_point():
        return  # experts by token id
    if values.element_size() == 1:  # torch draws no such numbers
        _vllms_own(values)
        return
    with torch.inference_mode():
        if values.ndim < 2:
            values.fill_(1.0)
        else:
            values.normal_(0.0, values.shape[-1] ** -0.5, generator=_generator(values.device))


def _generator(device: torch.device) -> torch.Generator:
    return _generators.setdefault(device, torch.Generator(device).manual_seed(5))


# vLLM imports this module before it loads the model.
dummy_loader.initialize_single_dummy_weight = _sensible


class EngineExtension(CheckingExtension):
    """PoC's extension with a few methods more."""

    def poc_test_prompt(self, block_hash: str, public_key: str, nonce: int, seq_len: int) -> list[int]:
        """Give the token ids of a nonce its embeddings, reflect layers, and return the ids as a prompt.

        ValueError if a token occurs twice.
        """
        adapter = self._poc().stage.adapter
        body = self._poc_test_body()
        table = body.embed_tokens.weight
        ids = token_ids(torch.tensor(token_seed(block_hash, public_key, nonce)), seq_len, len(table))
        if len(ids.unique()) < seq_len:
            raise ValueError(f"nonce {nonce} has a token twice")
        rows = torch.empty(1, seq_len, table.shape[1], dtype=table.dtype, device=table.device)
        seeds = input_seeds(block_hash, public_key, nonce, strong_rng=False)
        fill_inputs(rows, torch.tensor([seeds], device=table.device))
        with torch.inference_mode():
            # Gemma multiplies what it looks up by this.
            table[ids] = rows[0] / getattr(body, "normalizer", 1.0)
        self._poc_test_hooks = ExitStack()
        vectors = layer_vectors(
            block_hash=block_hash, num_layers=len(adapter.layers), hidden=table.shape[1], device=table.device
        )
        reflected = dict(zip(adapter.layers, vectors, strict=True)) if self.poc_test_places() else {}
        self._poc_test_hooks.enter_context(reflected_layers(reflected))
        self._poc_test_found: list[Tensor] = []
        self._poc_test_hooks.enter_context(body.norm.register_forward_hook(self._poc_test_record))
        return [int(token) for token in ids]

    def poc_test_answer(self, block_hash: str, public_key: str, nonce: int, k_dim: int) -> list[float]:
        """Return the artifact that follows from the first forward pass since, and let chat be chat again."""
        self._poc_test_hooks.close()
        last = self._poc_test_found[0][-1:].cpu()
        seeds = torch.tensor([nonce_seeds(block_hash, public_key, nonce, artifact_purposes(k_dim))])
        values: list[float] = artifact_vectors(last, Selection.of(seeds, hidden=last.shape[1]))[0].tolist()
        return values

    def poc_test_places(self) -> list[str]:
        """Return where the network's plugin finds decoder layers in the model: the first such place, or none."""
        model = self.model_runner.get_model()
        return [path for path in ("model.layers", "transformer.h", "layers") if _has(model, path)]

    def _poc_test_body(self) -> nn.Module:
        model = self.model_runner.get_model()
        return getattr(model, "language_model", model).model

    def _poc_test_record(self, _: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._poc_test_found.append((output if isinstance(output, Tensor) else output[0]).clone())


def _has(model: nn.Module, path: str) -> bool:
    *roots, name = path.split(".")
    for root in roots:
        model = getattr(model, root, None)
    return hasattr(model, name)
