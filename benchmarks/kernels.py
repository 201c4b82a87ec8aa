# SPDX-License-Identifier: Apache-2.0
"""PYTHONPATH=image:. python3 -m benchmarks.kernels: how near the small kernels come to a copy of as many bytes.

Each call takes other buffers, which together are larger than the card's cache. The copy changes the sign: what only
copies is no kernel. Needs torch with Triton and an NVIDIA GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_poc.kernels import layers
from vllm_poc.kernels.router import exact_product

#: More than the cache of any card.
CACHE_BYTES = 256 << 20
REPLAYS = 11
#: Tokens of a pass and elements of a row: Qwen3-0.6B, Qwen3-32B, Qwen3-235B-A22B.
ROWS = [(8192, 1024), (8192, 5120), (32_768, 4096)]
#: Tokens, and the size of the feed-forward layer.
GATES = [(8192, 3072), (8192, 25_600)]
#: Tokens, heads of queries, of keys; the last ones with half of the heads on each of two GPUs.
HEADS = [(8192, 16, 8), (8192, 64, 8), (32_768, 32, 2)]
HEAD_DIM, POSITIONS, GROUP, EPSILON = 128, 1024, 128, 1e-6
#: Tokens, and experts and elements of a row of MiniMax-M2.
ROUTED, EXPERTS, ROUTED_SIZE = [8192, 32_768], 256, 3072


class Case(NamedTuple):
    """A call of a kernel with a tensor of 16-bit numbers, and how many bytes it reads and writes."""

    name: str
    shape: tuple[int, ...]
    moved: int
    call: Callable[[Tensor], object]


def main() -> None:
    """Print a line for each kernel and shape."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'kernel':24} {'shape':>15} {'us':>8} {'GB/s':>6} {'of a copy':>9}")
    for case in [*_of_rows(), *_gates(), *_rotations(), *_routers()]:
        taken, copied = _seconds(case), _seconds(_copy_of(case.moved))
        shape, rate = " x ".join(map(str, case.shape)), case.moved / taken / 1e9
        print(f"{case.name:24} {shape:>15} {1e6 * taken:8.1f} {rate:6.0f} {copied / taken:9.1%}", flush=True)


def _of_rows() -> Iterator[Case]:
    for rows, n in ROWS:
        weight, size = _random(n), 2 * rows * n
        vector = torch.nn.functional.normalize(_random(n).float(), dim=0)
        yield Case("norm", (rows, n), 2 * size, partial(_norm, weight))
        yield Case("reflection", (rows, n), 2 * size, partial(_reflect, vector))
        yield Case("sum and norm", (2, rows, n), 4 * size, partial(_add_norm, weight, None))
        yield Case("the same, reflected", (2, rows, n), 4 * size, partial(_add_norm, weight, vector))
        yield Case("quantisation", (rows, n), 3 * size // 2, _quantise)


def _gates() -> Iterator[Case]:
    for rows, n in GATES:
        yield Case("gate", (rows, 2 * n), 6 * rows * n, layers.gated)


def _rotations() -> Iterator[Case]:
    for rows, queries, keys in HEADS:
        tables = (torch.arange(rows, device="cuda") % POSITIONS, _random(POSITIONS, HEAD_DIM), _random(HEAD_DIM))
        moved = 4 * rows * (queries + keys) * HEAD_DIM
        call = partial(_norm_and_rotate, *tables, queries)
        yield Case("norm and rotation", (rows, (queries + 2 * keys) * HEAD_DIM), moved, call)


def _routers() -> Iterator[Case]:
    weight = _random(EXPERTS, ROUTED_SIZE).float()
    for rows in ROUTED:
        moved = rows * (2 * ROUTED_SIZE + 4 * EXPERTS)
        yield Case("router", (rows, ROUTED_SIZE), moved, partial(_route, weight))
        yield Case("the same in float32", (rows, ROUTED_SIZE), moved, partial(_route_in_float32, weight))


def _route(weight: Tensor, x: Tensor) -> Tensor:
    return exact_product(x, weight)


def _route_in_float32(weight: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.float(), weight)


def _norm(weight: Tensor, x: Tensor) -> Tensor:
    return layers.norm(x, weight, EPSILON)


def _reflect(vector: Tensor, x: Tensor) -> None:
    layers.reflect(x, vector)


def _add_norm(weight: Tensor, vector: Tensor | None, x: Tensor) -> None:
    layers.add_norm(x[0], x[1], weight, EPSILON, vector)


def _norm_and_rotate(positions: Tensor, cos_sin: Tensor, weight: Tensor, heads: int, qkv: Tensor) -> None:
    layers.norm_and_rotate(qkv, positions, cos_sin, weight, weight, q_heads=heads, epsilon=EPSILON)


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = torch.empty_strided((len(x), x.shape[1] // GROUP), (1, len(x)), device="cuda")
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    layers.quantise(x, out, scales, epsilon=1e-10, powers_of_two=True)
    return out, scales


def _copy_of(moved: int) -> Case:
    return Case("copy", (2, moved // 4), moved, _copy)


def _copy(x: Tensor) -> None:
    torch.neg(x[1], out=x[0])


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _seconds(case: Case) -> float:
    """Return the median time of a call, in a CUDA graph of calls with one buffer each."""
    buffers = [_random(*case.shape) for _ in range(1 + CACHE_BYTES // (2 * math.prod(case.shape)))]
    case.call(buffers[0])  # compiles it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [case.call(buffer) for buffer in buffers]  # kept, or all would be written to one place
    del results  # the graph has their memory
    return median(_milliseconds(graph) for _ in range(REPLAYS)) / 1000 / len(buffers)


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    taken: float = begin.elapsed_time(end)
    return taken


if __name__ == "__main__":
    main()
