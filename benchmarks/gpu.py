# SPDX-License-Identifier: Apache-2.0
"""PYTHONPATH=image:. python3 -m benchmarks.gpu [--shape NAME]: nonces per second on the GPUs of this machine.

Measured against two things in the same run: the cards' own product of matrices (the limit is that rate over the
operations of a nonce), and the plain way of computing. On a pipeline, also against the same passes one by one. With
--equality, also how far results are from those of vLLM's own forward pass, each operation by itself; with --profile,
which kernels take how long. Needs vLLM and NVIDIA GPUs; weights are random.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.gpu_equality import equality
from benchmarks.gpu_pod import MAX_TOKENS, Pod, call, described
from benchmarks.gpu_shapes import ARGUMENTS, AS_SERVED, PART_OF, SHAPES, write_shape
from vllm import LLM

#: Characters of a kernel's name that are printed.
_NAME = 110


def main() -> None:
    """Measure as the command line says, and print a table and the same as JSON."""
    options = _options()
    model, config = served(options, extension="benchmarks.gpu_worker.MeasuringExtension")
    call(model, "poc_bench_weights")
    pod = Pod(model, described(model), options)
    rows = []
    for seq_len in options.seq_len:
        for row in pod.rows(config, seq_len):
            print("\n".join([_line(row), *_kernels(row)]), flush=True)
            equal = equality(model, seq_len, row["nonces"], options.equality)
            rows.append(row | equal)
            if equal:
                print(f"  from the unfused pass: {equal}", flush=True)
    served_part = {"shape": options.shape, "layers": options.layers, "part_of": options.part_of}
    print(json.dumps({**served_part, "facts": pod.facts, "rows": rows}))


def served(options: argparse.Namespace, *, extension: str) -> tuple[LLM, dict[str, Any]]:
    """Return the model that the command line asks for, served with this worker extension, and its configuration."""
    if options.part_of > 1 and options.tensor_parallel > 1:
        raise SystemExit("--part-of is for a single GPU: leave out --tensor-parallel")
    config = write_shape(options.shape, folder := Path(mkdtemp()), layers=options.layers, ranks=options.part_of)
    model = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,  # as the reference asks for; makes no difference to PoC itself
        max_model_len=4096,
        max_num_seqs=options.sequences,
        max_num_batched_tokens=options.batched_tokens,
        gpu_memory_utilization=options.memory,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        tensor_parallel_size=options.tensor_parallel,
        pipeline_parallel_size=options.pipeline_parallel,
        worker_extension_cls=extension,
        **({"moe_backend": options.moe_backend} if options.moe_backend is not None else {}),
        **ARGUMENTS.get(options.shape, {}),
        **(AS_SERVED.get(options.shape, {}) if options.as_served else {}),
    )
    return model, config


def _line(row: dict[str, Any]) -> str:
    of_naive = f"  {row['of_naive']:5.2f} x {row['naive']:.1f}" if "naive" in row else ""
    of_serial = f"  {row['of_serial']:5.2f} x one by one" if "of_serial" in row else ""
    return (
        f"seq_len {row['seq_len']:5}  passes of {row['nonces']:4} in {row['segments']:3}  {row['rate']:9.2f} nonces/s  "
        f"{row['of_limit']:6.1%} of {row['limit']:.1f} ({row['of_hot_limit']:.1%} when hot){of_naive}{of_serial}  "
        f"slices {row['slice_seconds']['median']:.4f} s, at most {row['slice_seconds']['largest']:.4f} s"
    )


def _kernels(row: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each kernel of a pass, and one for the time between them."""
    if "profile" not in row:
        return
    seconds, kernels = row["profile"]["seconds"], row["profile"]["kernels"]
    rows = sorted(((kernel["seconds"], kernel["calls"], name) for name, kernel in kernels.items()), reverse=True)
    rows.append((seconds - sum(taken for taken, *_ in rows), 0, "no kernel"))
    for taken, calls, name in rows:
        yield f"  {1000 * taken:9.3f} ms  {taken / seconds:6.1%}  {calls:6} times  {name[:_NAME]}"


def _options() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", help="of a forward pass, instead of the pod's own choice")
    parser.add_argument("--slice-seconds", type=float, default=0.05, help="the pod's setting")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--equality", type=int, default=0, help="nonces whose results are compared; none by default")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a pass")
    parser.add_argument("--no-naive", action="store_true", help="leave the plain way out")
    return parser.parse_args()


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what to serve, and how."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="only so many of the shape's layers")
    parser.add_argument("--part-of", type=int, default=1, metavar="RANKS", help=PART_OF)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of vllm serve")
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="as of vllm serve; by default what --memory leaves")
    parser.add_argument("--batched-tokens", type=int, default=MAX_TOKENS, help="--max-num-batched-tokens of vllm serve")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the GPU's memory for vLLM")
    parser.add_argument("--sequences", type=int, default=1024, help="--max-num-seqs of vllm serve")
    parser.add_argument("--moe-backend", help="as of vllm serve, which chooses by itself without")
    parser.add_argument("--as-served", action="store_true", help="with the flags that the network asks for")
    return parser


if __name__ == "__main__":
    main()
