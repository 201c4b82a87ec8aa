# SPDX-License-Identifier: Apache-2.0
"""The last layer need not finish the tokens whose output nobody reads: all but the last of each sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn

from vllm_poc.worker.fusion.operations import is_plain_norm

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm_poc.worker.internals import BatchShape


def last_tokens_only(layer: nn.Module, shape: BatchShape) -> AbstractContextManager[None]:
    """Drop the other tokens behind the attention of ``layer``, the model's last, while the context lasts.

    The forward pass then returns ``[nonces, hidden]``. Does nothing if the layer has another form.
    """
    attention = getattr(getattr(layer, "self_attn", None), "attn", None)
    norm = getattr(layer, "post_attention_layernorm", None)
    known = attention is not None and is_plain_norm(norm) and "residual" in inspect.signature(layer.forward).parameters
    return _shortened(attention, norm, shape) if known else nullcontext()


@contextmanager
def _shortened(attention: nn.Module, norm: nn.Module, shape: BatchShape) -> Iterator[None]:
    def last(tokens: Tensor) -> Tensor:
        return tokens.view(*shape, -1)[:, -1].contiguous()

    def drop_residual(_: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, residual = inputs
        return hidden, last(residual)

    with (
        attention.register_forward_hook(lambda *call: last(call[-1])),
        norm.register_forward_pre_hook(drop_residual),
    ):
        yield
