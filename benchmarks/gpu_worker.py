# SPDX-License-Identifier: Apache-2.0
"""A worker extension that also measures the GPU, and PoC the way its reference computes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import nn

from tests.gpu.unfused import UnfusedExtension
from vllm_poc.maths.sampling import fill_stepwise
from vllm_poc.rpc import BatchRequest, PassSpec
from vllm_poc.worker.model.capabilities import model_facts
from vllm_poc.worker.model_runner import PocModelRunner, Stage
from vllm_poc.worker.passes.attention import is_compressed
from vllm_poc.worker.passes.recurrent import is_recurrent
from vllm_poc.worker.results import draw, result_values, seeds_of

_SIDE = 8192
#: Size of a quantised weight, of 448 at most, and how many of them share a scale.
_QUANTISED, _GROUP = 64, 128
_IN_A_ROW = 5
#: An exponent of two on its own, 2^-6: with it numbers of 4 bits are as large as those of other weights.
_SMALL_POWER = 121
#: Rows that are filled at a time.
_ROWS = 4096
#: What GLM-5.3's layers make of their weights in the first forward pass, which the engine's start has run already.
_MADE_OF_WEIGHTS = ("_merged_conv_weight", "_wp_fp32")
#: What an FP8 cache divides by: 1 where a checkpoint says nothing, and next to nothing in vLLM's dummy weights.
_CACHE_SCALES = {"_q_scale", "_k_scale", "_v_scale"}


class Kernel(TypedDict):
    """How often a kernel ran, and how long in all."""

    calls: int
    seconds: float


class Profile(TypedDict):
    """The time from the first kernel's start to the last one's end, and the kernels by name."""

    seconds: float
    kernels: dict[str, Kernel]


class MeasuringExtension(UnfusedExtension):
    """PoC's extension with a few methods more."""

    _poc_refuses_unproven = False

    def poc_bench_weights(self) -> None:
        """Give all weights a sensible size; vLLM's dummy weights are next to nothing."""
        generator = torch.Generator("cuda").manual_seed(5)
        with torch.inference_mode():
            for name, parameter in self.model_runner.get_model().named_parameters():
                _fill(name, parameter.data, generator)
            for layer in self.model_runner.vllm_config.compilation_config.static_forward_context.values():
                for name in _CACHE_SCALES & vars(layer).get("_buffers", {}).keys():
                    getattr(layer, name).fill_(1.0)
            _make_of_weights_again(self.model_runner.get_model(), self.model_runner.vllm_config.model_config.dtype)

    def poc_bench_peak(self, seconds: float) -> tuple[float, float]:
        """Return the operations per second of a large product of matrices in bfloat16.

        At the card's best, and over all of the time, in which it gets hot and slower.
        """
        left, right = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        times, started = list[float](), time.perf_counter()
        while time.perf_counter() - started < seconds:
            times.append(_seconds_of_product(left, right))
        return 2 * _SIDE**3 / min(times), 2 * _SIDE**3 * len(times) / sum(times)

    def poc_bench_profile(self, request: BatchRequest, calls: int) -> Profile:
        """Return what the GPU does while the request is computed in so many calls."""
        return profiled(lambda: [self._poc().prepare(request)() for _ in range(calls)])

    def poc_bench_naive(self, request: BatchRequest, seconds: float) -> float:
        """Return the nonces per second of the plain way, on one GPU.

        The inputs nonce by nonce in many operations, vLLM's eager forward pass for 32 nonces, then the results.
        """
        adapter, spec = self._poc().stage.adapter, PassSpec.of(request)
        nonces, limits = len(request["nonces"]), model_facts(self.model_runner.vllm_config)
        layers, tokens = adapter.attention_layers.values(), nonces * spec.seq_len
        if (is_recurrent(layers) or is_compressed(layers)) and tokens > limits["max_batch_tokens"]:
            raise ValueError(
                f"this attention has room for fewer tokens: ask for --batched-tokens {tokens} or --no-naive"
            )
        limits |= {"max_batch_nonces": nonces, "max_batch_tokens": nonces * spec.seq_len}
        stage = PocModelRunner(adapter, limits).stage
        with torch.inference_mode():
            stage.load(request["block_hash"], spec)
            _naive_batch(stage, spec, request)
            count, started = 0, time.perf_counter()
            while time.perf_counter() - started < seconds:
                _naive_batch(stage, spec, request)
                count += len(request["nonces"])
            return count / (time.perf_counter() - started)


def profiled(work: Callable[[], object]) -> Profile:
    """Return what the GPU does while the work is done."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with profiler:
        work()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels: dict[str, Kernel] = {}
    for event in events:
        kernel = kernels.setdefault(event.name, Kernel(calls=0, seconds=0.0))
        kernel["calls"] += 1
        kernel["seconds"] += event.time_range.elapsed_us() / 1e6
    began = min((event.time_range.start for event in events), default=0.0)
    ended = max((event.time_range.end for event in events), default=0.0)
    return Profile(seconds=(ended - began) / 1e6, kernels=kernels)


def _make_of_weights_again(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name in _MADE_OF_WEIGHTS:
            if hasattr(module, name):
                setattr(module, name, None)
        if type(module).__name__ == "MLAAttention":
            module.process_weights_after_loading(dtype)


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if weight.dtype == torch.float8_e4m3fn:
        _fill_quantised(weight, generator)
    elif weight.dtype == torch.float8_e8m0fnu:
        weight.view(torch.uint8).fill_(_SMALL_POWER)
    elif not weight.is_floating_point():
        _fill_packed(name, weight, generator)
    elif "scale" in name and "hc_" not in name:
        weight.fill_(2.0 ** round(math.log2((_GROUP * weight.shape[-1]) ** -0.5 / _QUANTISED)))
    elif weight.ndim == 1:
        weight.fill_(1.0)
    else:
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


def _fill_packed(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill numbers of 4 bits that lie in integers; tables of experts by token id are random already."""
    if "experts" in name:
        for rows in weight.view(torch.uint8).flatten(0, -2).split(_ROWS):
            rows.random_(0, 256, generator=generator)


def _fill_quantised(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill matrix by matrix: a model's experts are one tensor."""
    for matrix in weight[None].flatten(0, -3):
        numbers = torch.randn(matrix.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        matrix.copy_((_QUANTISED * numbers).to(weight.dtype))


def _naive_batch(stage: Stage, spec: PassSpec, request: BatchRequest) -> None:
    device, hidden_size = stage.adapter.device, stage.limits["hidden_size"]
    seeds = seeds_of(spec, request, request["nonces"]).to(device)
    inputs = torch.empty(len(seeds), spec.seq_len, hidden_size, dtype=stage.adapter.dtype, device=device)
    for row, seed in zip(inputs.view(len(seeds), -1), seeds[:, 0], strict=True):
        fill_stepwise(row, seed)
    hidden = stage.forward(spec, stage.inputs(spec, seeds)._replace(embeddings=inputs), {}, len(seeds))
    assert isinstance(hidden, torch.Tensor)  # noqa: S101 - one GPU has all layers
    result_values(hidden, draw(seeds, spec, hidden=hidden_size), stage.tensors).cpu()


def _seconds_of_product(left: torch.Tensor, right: torch.Tensor) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_IN_A_ROW):
        left @ right
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / _IN_A_ROW
