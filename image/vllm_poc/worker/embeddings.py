# SPDX-License-Identifier: Apache-2.0
"""How PoC's embeddings get into a model: as an argument, or in place of what its embedding layer returns."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def token_embeddings(model: nn.Module) -> list[nn.Module]:
    """Return the layers that look something up by token id; none on the later stages of a pipeline."""
    return [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]


def takes_embeddings(model: nn.Module) -> bool:
    """Whether the model's forward pass has an argument for embeddings."""
    return "inputs_embeds" in inspect.signature(model.forward).parameters


@contextmanager
def model_inputs(model: nn.Module, embeddings: Tensor | None) -> Iterator[dict[str, Tensor | None]]:
    """Yield the arguments by which one forward pass reads ``embeddings`` ``[tokens, hidden]``.

    None stands for the later stages of a pipeline, which read what the stage before sent.
    A model without an argument for them looks up token 0 everywhere, and while the context lasts its embedding
    layer returns ``embeddings`` instead. What the model does to its own embeddings it then does to these.
    """
    if takes_embeddings(model):
        yield {"input_ids": None, "inputs_embeds": embeddings}
        return
    if embeddings is None:
        yield {"input_ids": None}
        return
    (layer,) = token_embeddings(model)
    with layer.register_forward_hook(lambda *_: embeddings):
        yield {"input_ids": torch.zeros(len(embeddings), dtype=torch.int64, device=embeddings.device)}
