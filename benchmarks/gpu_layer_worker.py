# SPDX-License-Identifier: Apache-2.0
"""A worker extension that keeps what each layer reads and makes, to compare passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.gpu_worker import MeasuringExtension
from tests.gpu.unfused import unfused
from vllm_poc.rpc import BatchRequest, PassSpec
from vllm_poc.worker.model.capabilities import model_facts
from vllm_poc.worker.model_runner import PocModelRunner, Stage
from vllm_poc.worker.results import seeds_of

#: Parts of a layer whose results are compared, where it has them.
_PARTS = ("self_attn", "mlp.gate", "mlp.shared_experts", "mlp")
#: A token whose numbers are this much apart went to other experts, or saw those that did.
_OFF = 0.1

#: Relative distance of all tokens, and the share of those that are off, by the part of a layer.
_Apart: TypeAlias = dict[str, tuple[float, float]]


class _Layer(NamedTuple):
    """What a layer read, and what its parts and itself made, ``[tokens, ...]``."""

    read: tuple[Any, ...]
    made: dict[str, tuple[Tensor, ...]]


class LayerExtension(MeasuringExtension):
    """The measuring extension with one method more."""

    def poc_bench_layers(self, request: BatchRequest) -> dict[str, list[_Apart]]:
        """Return how far passes over the request's nonces are apart, behind each layer."""
        runner = self._poc()
        adapter, nonces = runner.stage.adapter, request["nonces"]
        own = PocModelRunner(adapter, model_facts(self.model_runner.vllm_config)).stage
        natively = partial(unfused, adapter.model)

        def run(stage: Stage, share: int = 1, way: Any = nullcontext, read: Any = None) -> list[_Layer]:  # noqa: ANN401
            size = max(1, len(nonces) // share)
            parts = [range(start, start + size) for start in range(0, len(nonces), size)]
            return _joined([_run(stage, request, part, way(), read) for part in parts])

        expected = run(own)
        return {
            "fused from vLLM's own": _compared(run(runner.stage), expected),
            "vLLM's own, once more": _compared(run(own), expected),
            "vLLM's own in halves": _compared(run(own, 2), expected),
            "vLLM's own, each operation by itself": _compared(run(own, way=natively), expected),
            "fused, nonce by nonce, from all at once": _compared(run(runner.stage, len(nonces)), run(runner.stage)),
            "fused from vLLM's own, layer by layer": _compared(run(runner.stage, read=expected), expected),
            "vLLM's own in halves, layer by layer": _compared(run(own, 2, read=expected), expected),
            "each operation by itself, layer by layer": _compared(run(own, way=natively, read=expected), expected),
        }


def _run(
    stage: Stage, request: BatchRequest, part: range, way: AbstractContextManager[None], read: Sequence[_Layer] | None
) -> list[_Layer]:
    """Run the nonces at the places ``part``; if ``read``, let each layer read what that layer did for them."""
    spec = PassSpec.of(request)
    nonces = [request["nonces"][place] for place in part]
    tokens = slice(part.start * spec.seq_len, part.stop * spec.seq_len)
    seeds = seeds_of(spec, request, nonces).to(stage.adapter.device)
    with torch.inference_mode(), way, _recorded(stage.adapter.own_layers, tokens, read) as found:
        stage.load(request["block_hash"], spec)
        stage.batch(spec, seeds, {})
    torch.cuda.synchronize()
    return found


@contextmanager
def _recorded(layers: Sequence[nn.Module], tokens: slice, read: Sequence[_Layer] | None) -> Iterator[list[_Layer]]:
    found: list[_Layer] = []

    def begin(number: int, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if read is not None:
            inputs = tuple(
                _cloned(value[tokens] if isinstance(value, Tensor) else value) for value in read[number].read
            )
        found.append(_Layer(tuple(_cloned(value) for value in inputs), {}))
        return inputs

    def end(name: str, _: nn.Module, _inputs: object, output: Any) -> None:  # noqa: ANN401 - each has its own
        made = output if isinstance(output, tuple) else (output,)
        found[-1].made[name] = tuple(_cloned(value) for value in made if isinstance(value, Tensor))

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_pre_hook(partial(begin, number)))
            stack.enter_context(layer.register_forward_hook(partial(end, "layer")))
            parts = dict(layer.named_modules(remove_duplicate=False))
            for name in _PARTS:
                if name in parts:
                    stack.enter_context(parts[name].register_forward_hook(partial(end, name)))
        yield found


def _cloned(value: Any) -> Any:  # noqa: ANN401 - anything that a layer takes
    return value.clone() if isinstance(value, Tensor) else value


def _joined(parts: Sequence[list[_Layer]]) -> list[_Layer]:
    """Join what a layer made of the parts of a batch; what it read is that of the first alone, if there are several."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return [
        _Layer(
            (),
            {
                name: tuple(
                    torch.cat(values) for values in zip(*(part[number].made[name] for part in parts), strict=True)
                )
                for name in layer.made
            },
        )
        for number, layer in enumerate(first)
    ]


def _compared(found: Sequence[_Layer], expected: Sequence[_Layer]) -> list[_Apart]:
    return [
        {
            f"{name}.{place}": _apart(*pair)
            for name in one.made
            for place, pair in enumerate(zip(one.made[name], other.made[name], strict=True))
        }
        for one, other in zip(found, expected, strict=True)
    ]


def _apart(found: Tensor, expected: Tensor) -> tuple[float, float]:
    difference, size = (
        (found.float() - expected.float()).flatten(1).norm(dim=1),
        expected.float().flatten(1).norm(dim=1),
    )
    relative = float(difference.norm() / size.norm())
    return relative, float((difference > _OFF * size).float().mean())
