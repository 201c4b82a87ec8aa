# SPDX-License-Identifier: Apache-2.0
"""A forward pass through a few of the layers: enough to learn what all of them need, in a fraction of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from vllm_poc.worker.model.adapter import ModelAdapter

#: Layers of one kind differ in their weights alone; the first of them in a pass takes longer than the others.
_FEW = 4
#: What mixes several residual streams, in layers of DeepSeek-V4 and GLM-5.3. The first makes the streams of one.
_MIXES_STREAMS = "hc_attn_fn"
#: Where GLM-5.3 keeps the layers from ``start_layer`` to ``end_layer`` that it walks through.
_WALKED = "_active_layers"


def spans(adapter: ModelAdapter) -> list[range]:
    """Return which of this stage's layers to run so that each kind has run once; of the last span, most are alike.

    These are the last few, before them the first few if some kinds are there alone, or all. Where only the first layer
    can come first, they are as many from there.
    """
    layers = adapter.own_layers
    count, kinds = len(layers), [_kind(layer) for layer in layers]
    if has_streams(adapter):
        return [range(1 + max(kinds.index(kind) for kind in kinds))]
    first, last = range(min(_FEW, count)), range(max(0, count - _FEW), count)
    for some in ([last], [first, last]):
        if {kinds[index] for span in some for index in span} == set(kinds):
            return some
    return [range(count)]


def comparable(adapter: ModelAdapter) -> range:
    """Return the layers of this stage behind which two passes can be compared: all, or the first few.

    Layers with several streams send a token to other experts when the last bit of a sum differs, and behind all layers
    vLLM's own pass is far from itself with other sequences beside.
    """
    if has_streams(adapter):
        (first,) = spans(adapter)
        return first
    return range(len(adapter.own_layers))


def has_streams(adapter: ModelAdapter) -> bool:
    """Whether the layers of this stage have several residual streams, of which only the first layer can make one."""
    return any(hasattr(layer, _MIXES_STREAMS) for layer in adapter.own_layers)


def stands_alone(adapter: ModelAdapter) -> bool:
    """Whether all that a layer reads are its arguments, so that layers can be compared one by one: those of GLM-5.3."""
    stack = _stack(adapter)
    return stack is not None and hasattr(stack, _WALKED)


@contextmanager
def only(adapter: ModelAdapter, span: range) -> Iterator[float]:
    """Let the model run these layers alone while the context lasts, and yield how many times as many it has.

    All run if the model does not walk through its layers as vLLM's models do.
    """
    stack, count = _stack(adapter), len(adapter.own_layers)
    if stack is None or len(span) in (0, count):
        yield 1.0
        return
    before: tuple[int, int] = stack.start_layer, stack.end_layer
    walked = getattr(stack, _WALKED, None)
    try:
        stack.start_layer, stack.end_layer = before[0] + span.start, before[0] + span.stop
        if walked is not None:
            setattr(stack, _WALKED, walked[span.start : span.stop])
        yield count / len(span)
    finally:
        stack.start_layer, stack.end_layer = before
        if walked is not None:
            setattr(stack, _WALKED, walked)


def _stack(adapter: ModelAdapter) -> nn.Module | None:
    """Return the module that walks through the layers from ``start_layer`` to ``end_layer``."""
    for module in adapter.model.modules():
        walks = {"start_layer", "end_layer"} <= vars(module).keys()
        if walks and any(child is adapter.stack for child in module.children()):
            return module
    return None


def _kind(layer: nn.Module) -> object:
    """Return what decides the operations of a layer: its class, the form of its weights, its attention's window."""
    weights = tuple((name, value.shape, value.dtype) for name, value in layer.named_parameters())
    windows = tuple(str(getattr(getattr(part, "impl", None), "sliding_window", None)) for part in layer.modules())
    return type(layer), weights, windows
