# SPDX-License-Identifier: Apache-2.0
"""A worker extension that also tells how many bytes a decode step must read, and how fast the card reads."""

from __future__ import annotations

import time
from typing import TypedDict

import torch
from torch import nn

from benchmarks.gpu_worker import MeasuringExtension, Profile, profiled
from vllm_poc.maths import decode
from vllm_poc.rpc import DecodeRequest
from vllm_poc.worker.model.scratch import CacheGroup
from vllm_poc.worker.passes import fused
from vllm_poc.worker.passes.plain import find_routers

_COPIED, _TIMES = 2**32, 10
#: Dimensions of a weight that has one matrix for each expert.
_OF_EXPERTS = 3
#: Who describes what DeepSeek-V4 has yet to compress, of which a step reads about one token and writes one.
_COMPRESSOR, _COMPRESSED_TOKENS = "CompressorMetadataBuilder", 2
#: Steps whose experts are looked at.
_LOOKED_AT = (1, 2, 3, 4)


class StepBytes(TypedDict):
    """What this rank reads in a step, each byte once: weights of all layers, and keys and values of all chains.

    States are read and written. ``experts`` is the share of experts that some chain goes to, whose weights alone count.
    """

    weights: float
    keys_and_values: float
    experts: float


class DecodeExtension(MeasuringExtension):
    """The measuring extension with a few methods more."""

    def poc_bench_vllms_tiles(self) -> None:
        """Let experts have vLLM's own tiles in steps, too."""
        vars(fused)["tile_patches"] = lambda: ()

    def poc_bench_steps_profile(self, request: DecodeRequest) -> Profile:
        """Return what the GPU does while chains that have begun take the next steps."""
        decoder = self._poc_decoder
        assert decoder is not None  # noqa: S101 - prepared before
        return profiled(lambda: decoder.run(request))

    def poc_bench_bandwidth(self) -> float:
        """Return the bytes per second, read and written, of a large copy on the device."""
        source = torch.empty(_COPIED, dtype=torch.uint8, device="cuda").random_(0, 256)
        target, times = torch.empty_like(source), list[float]()
        for _ in range(_TIMES):
            torch.cuda.synchronize()
            started = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        del source, target
        torch.cuda.empty_cache()
        return 2 * _COPIED / sorted(times)[_TIMES // 2]

    def poc_bench_step_bytes(self, request: DecodeRequest) -> StepBytes:
        """Return what a step of these chains reads on average."""
        assert self._poc_decoder is not None  # noqa: S101 - prepared before
        adapter, facts, experts = self._poc().stage.adapter, self._poc_decoder.facts, self._poc_experts_hit(request)
        tokens = request["seq_len"] + (request["max_tokens"] + 1) / 2
        of_chain = 0.0
        for group, size in zip(adapter.groups, facts["block_bytes"], strict=True):
            of_chain += size * _blocks_read(group, tokens)
        weights = sum(_weights(layer, experts) for layer in adapter.own_layers)
        return StepBytes(weights=weights, keys_and_values=len(request["nonces"]) * of_chain, experts=experts)

    def poc_bench_prefill_tokens(self) -> int:
        """Return how many tokens of chains are prefilled at a time."""
        assert self._poc_decoder is not None  # noqa: S101 - prepared before
        return self._poc_decoder._reserve.prefill_tokens

    def _poc_experts_hit(self, request: DecodeRequest) -> float:
        """Return the share of experts that some nonce goes to, over all layers and a few steps."""
        adapter = self._poc().stage.adapter
        if not adapter.experts:
            return 1.0
        routers = range(len(find_routers(adapter.own_layers)))
        seeds = [[decode.route_seed(request["block_hash"], n, router) for n in request["nonces"]] for router in routers]
        shares = list[float]()
        for step in _LOOKED_AT:
            steps = torch.full((len(request["nonces"]),), step, device=adapter.device)
            logits = decode.seeded_logits(
                torch.tensor(seeds, device=adapter.device),
                steps,
                experts=adapter.experts,
                top_k=adapter.experts_per_token,
            )
            shares.append(float((logits > 0).any(dim=1).float().mean()))
        return sum(shares) / len(shares)


def _blocks_read(group: CacheGroup, tokens: float) -> float:
    """Return how many blocks a step of a chain reads of so many tokens."""
    if group.stateful:
        return 2.0
    if type(group.builder).__name__ == _COMPRESSOR:
        return _COMPRESSED_TOKENS / group.block_size
    kept = tokens if group.kept is None else min(tokens, group.kept * group.block_size)
    return kept / group.block_size


def _weights(layer: nn.Module, experts: float) -> float:
    """Return the bytes of a layer's weights that are read, when this share of its experts has work."""
    sizes = ((weight.numel() * weight.element_size(), weight.ndim) for weight in layer.parameters())
    return sum(float(size * (experts if ndim == _OF_EXPERTS else 1.0)) for size, ndim in sizes)
