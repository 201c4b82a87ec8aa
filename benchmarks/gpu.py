# SPDX-License-Identifier: Apache-2.0
"""PYTHONPATH=image:. python3 -m benchmarks.gpu [--shape NAME]: nonces per second on the GPUs of this machine.

Measured against two things in the same run: the card's own product of matrices (the limit is that rate over the
operations of a nonce), and the plain way of computing. Needs vLLM and an NVIDIA GPU; weights are random.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import count, pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.gpu_shapes import SHAPES, flops_per_nonce, write_shape
from vllm import LLM
from vllm_poc.worker.batches import BatchRequest

#: Forward passes of the plain way.
NAIVE_NONCES = 32
#: Half of the pod's default for a slice, since two are on their way.
SLICE_SECONDS = 0.025
MAX_TOKENS = 8192


def main() -> None:
    """Measure as the command line says, and print a table and the same as JSON."""
    options = _options()
    config = write_shape(options.shape, folder := Path(mkdtemp()), layers=options.layers)
    model = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,  # as the reference asks for; makes no difference to PoC itself
        max_model_len=4096,
        max_num_seqs=1024,
        max_num_batched_tokens=MAX_TOKENS,
        gpu_memory_utilization=options.memory,
        tensor_parallel_size=options.tensor_parallel,
        pipeline_parallel_size=options.pipeline_parallel,
        worker_extension_cls="benchmarks.gpu_worker.MeasuringExtension",
    )
    gpus = options.tensor_parallel * options.pipeline_parallel
    call(model, "poc_bench_weights")
    facts = call(model, "poc_describe")
    rows = []
    for seq_len in options.seq_len:
        peak = call(model, "poc_bench_peak")
        limit = gpus * peak / flops_per_nonce(config, seq_len)
        naive = call(model, "poc_bench_naive", request(seq_len, range(NAIVE_NONCES)), options.seconds)
        for tokens in options.tokens:
            batch = max(1, tokens // seq_len)
            alone = call(model, "poc_rehearse", request(seq_len, range(batch)))["seconds"]
            rate = in_slices(model, seq_len, batch, alone, options.seconds)
            row = {"seq_len": seq_len, "batch": batch, "peak": peak, "limit": limit, "naive": naive, "rate": rate}
            rows.append(row | {"of_limit": rate / limit, "of_naive": rate / naive, "batch_seconds": alone})
            print(_line(rows[-1]), flush=True)
    print(json.dumps({"shape": options.shape, "layers": options.layers, "facts": facts, "rows": rows}))


def in_slices(model: LLM, seq_len: int, batch: int, batch_seconds: float, seconds: float) -> float:
    """Return the nonces per second in short slices, one after the other, as a pod computes them."""
    size = batch * max(1, int(SLICE_SECONDS / batch_seconds))
    slices = (range(start, start + size) for start in count(0, size))
    done, started = -1, 0.0
    for nonces, ahead in pairwise(slices):
        call(model, "poc_compute", request(seq_len, nonces, batch, ahead))
        done += 1
        if done == 0:
            started = time.perf_counter()
        elif time.perf_counter() - started > seconds:
            break
    return done * size / (time.perf_counter() - started)


def request(seq_len: int, nonces: range, batch: int | None = None, ahead: range = range(0)) -> BatchRequest:
    """Return a request of the artifact protocol."""
    return BatchRequest(
        protocol="artifact",
        block_hash="ab" * 32,
        public_key="benchmark",
        nonces=list(nonces),
        seq_len=seq_len,
        k_dim=12,
        strong_rng=False,
        layer_hooks=True,
        sign_flips=False,
        batch=batch or len(nonces),
        ahead=list(ahead),
    )


def call(model: LLM, method: str, *args: object) -> Any:  # noqa: ANN401 - each method has its own answer
    """Call the workers; the first answer that is one. SystemExit if it is an error."""
    answers = [answer for answer in model.collective_rpc(method, args=args) if answer is not None]
    for answer in answers:
        if isinstance(answer, dict) and "error" in answer:
            raise SystemExit(f"{method}: {answer['error']}")
    return answers[0] if answers else None


def _line(row: dict[str, Any]) -> str:
    return (
        f"seq_len {row['seq_len']:5}  batch {row['batch']:4}  {row['rate']:9.1f} nonces/s  "
        f"{row['of_limit']:6.1%} of {row['limit']:.1f}  {row['of_naive']:5.2f} x {row['naive']:.1f}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="only so many of the shape's layers")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="tokens of a forward pass")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.8, help="share of the GPU's memory for vLLM")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    return parser.parse_args()


if __name__ == "__main__":
    main()
