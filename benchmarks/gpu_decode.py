# SPDX-License-Identifier: Apache-2.0
"""PYTHONPATH=image:. python3 -m benchmarks.gpu_decode [--shape NAME]: chains per second on the GPUs of this machine.

A step's limit is the time in which the card reads each weight and each key and value once, at the rate of a large copy
in the same run. Steps are measured as CUDA graphs, and one by one. With two depths, ``--layers 4 8``, both are measured
one after the other, and what each further layer takes is added up to all layers of the shape. Needs vLLM and NVIDIA
GPUs; weights are random.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import TypedDict

from benchmarks.gpu import options_of, served
from benchmarks.gpu_pod import call, described
from benchmarks.gpu_shapes import SHAPES
from benchmarks.gpu_worker import Profile
from vllm import LLM
from vllm_poc.rpc import DecodeFacts, DecodeRequest, DecodeSetup

_GIB = 2**30
#: Steps of a profile, and how many kernels are printed.
_PROFILED, _KERNELS = 8, 30


class Row(TypedDict):
    """A batch of ``nonces`` chains: times in seconds, and what a step reads on each GPU, in bytes.

    ``prefill`` is that of the whole batch, ``step`` and ``one_by_one`` the mean of a step as a CUDA graph and without.
    ``limit`` is a step's shortest time, ``experts`` the share of experts with work.
    """

    nonces: int
    prefill: float
    step: float
    one_by_one: float
    limit: float
    weights: float
    keys_and_values: float
    experts: float


def main() -> None:
    """Measure as the command line says, and print a table and the same as JSON."""
    options = _options()
    if options.layers is not None and len(options.layers) > 1:
        depths = [_apart(options, layers) for layers in options.layers]
        rows = [_extrapolated(options, *pair) for pair in zip(*depths, strict=True)]
        _print(options, f"all {_all_layers(options)} layers, extrapolated", rows)
        return
    options.layers = options.layers[0] if options.layers else None
    rows = _measured(options)
    _print(options, f"{options.layers or 'all'} layers", rows)
    if options.out is not None:
        options.out.write_text(json.dumps(rows))


def _apart(options: argparse.Namespace, layers: int) -> list[Row]:
    """Measure one depth in a process of its own."""
    out = Path(mkdtemp()) / "rows.json"
    arguments = sys.argv[1:]
    first = arguments.index("--layers") + 1
    rest = arguments[:first] + arguments[first + len(options.layers) :]
    command = [sys.executable, "-m", "benchmarks.gpu_decode", *rest, "--out", str(out)]
    command[command.index("--layers") + 1 : command.index("--layers") + 1] = [str(layers)]
    subprocess.run(command, check=True)
    found: list[Row] = json.loads(out.read_text())
    return found


def _extrapolated(options: argparse.Namespace, few: Row, more: Row) -> Row:
    """Return the row of all layers: each further one takes what it takes from the first depth to the second."""
    low, high = options.layers
    times = (_all_layers(options) - high) / (high - low)

    def whole(name: str) -> float:
        return float(more[name] + times * (more[name] - few[name]))  # type: ignore[literal-required]

    return Row(
        nonces=more["nonces"],
        prefill=whole("prefill"),
        step=whole("step"),
        one_by_one=whole("one_by_one"),
        limit=whole("limit"),
        weights=whole("weights"),
        keys_and_values=whole("keys_and_values"),
        experts=more["experts"],
    )


def _all_layers(options: argparse.Namespace) -> int:
    shape = SHAPES[options.shape]
    return int(shape.get("text_config", shape)["num_hidden_layers"])


def _measured(options: argparse.Namespace) -> list[Row]:
    model, _ = served(options, extension="benchmarks.gpu_decode_worker.DecodeExtension")
    call(model, "poc_bench_weights")
    if options.vllms_tiles:
        call(model, "poc_bench_vllms_tiles")
    facts = described(model)
    if not facts["fused"]:
        raise SystemExit(f"the pass is not fused: {facts['findings']}")
    bandwidth = call(model, "poc_bench_bandwidth")
    print(f"a copy moves {bandwidth / 1e12:.2f} TB/s", flush=True)
    setup = DecodeSetup(codebook=None, rebuild=True, reserve_bytes=int(options.reserve * _GIB))
    prepared: DecodeFacts = call(model, "poc_prepare_decode", setup)
    if prepared["refusal"] is not None:
        raise SystemExit(prepared["refusal"])
    print(*prepared.get("findings", []), sep="\n", flush=True)
    together = max(1, call(model, "poc_bench_prefill_tokens") // options.seq_len[0])
    rows = [_row(model, options, nonces, -(-nonces // together), bandwidth) for nonces in options.nonces]
    if not call(model, "poc_test_captures"):
        raise SystemExit("steps are not captured")
    call(model, "poc_test_steps_one_by_one")
    for row in rows:
        row["one_by_one"] = _one_by_one(model, options, row["nonces"], -(-row["nonces"] // together))
    return rows


def _row(model: LLM, options: argparse.Namespace, nonces: int, prefills: int, bandwidth: float) -> Row:
    request = _request(options, nonces)
    _begin(model, request, prefills)  # compiles kernels, and captures a step
    other: DecodeRequest = {**request, "nonces": [nonce + nonces for nonce in request["nonces"]]}
    prefill = _seconds(model, {**other, "parts": prefills})
    steps = _seconds(model, {**other, "parts": options.max_tokens})
    read = call(model, "poc_bench_step_bytes", request)
    limit = (read["weights"] + read["keys_and_values"]) / bandwidth
    if options.profile:
        _profile(model, {**request, "parts": prefills}, nonces)
    return Row(
        nonces=nonces,
        prefill=prefill,
        step=steps / options.max_tokens,
        one_by_one=0.0,
        limit=limit,
        weights=read["weights"],
        keys_and_values=read["keys_and_values"],
        experts=read["experts"],
    )


def _profile(model: LLM, request: DecodeRequest, nonces: int) -> None:
    """Print which kernels take how much of a step."""
    call(model, "poc_decode", request)
    found: Profile = call(model, "poc_bench_steps_profile", {**request, "parts": _PROFILED})
    print(f"{nonces} chains, a step of {1000 * found['seconds'] / _PROFILED:.3f} ms")
    rows = sorted(
        ((kernel["seconds"], kernel["calls"], name) for name, kernel in found["kernels"].items()), reverse=True
    )
    for taken, calls, name in rows[:_KERNELS]:
        share = taken / found["seconds"]
        print(
            f"  {1000 * taken / _PROFILED:9.3f} ms  {share:6.1%}  {calls // _PROFILED:5} times  {name[:110]}",
            flush=True,
        )


def _one_by_one(model: LLM, options: argparse.Namespace, nonces: int, prefills: int) -> float:
    """Return the mean seconds of some steps in the middle of the chains that are not captured."""
    request = _request(options, nonces)
    _begin(model, request, prefills)
    steps: int = options.eager_steps
    return _seconds(model, {**request, "parts": steps}) / steps


def _begin(model: LLM, request: DecodeRequest, prefills: int) -> None:
    """Do the prefills and two steps. A call does passes of one kind, and ends once a step was captured."""
    for parts in (prefills, 1, 1):
        call(model, "poc_decode", {**request, "parts": parts})


def _seconds(model: LLM, request: DecodeRequest) -> float:
    started = time.perf_counter()
    call(model, "poc_decode", request)
    return time.perf_counter() - started


def _request(options: argparse.Namespace, nonces: int) -> DecodeRequest:
    return DecodeRequest(
        block_hash="b10c",
        public_key="key",
        nonces=list(range(nonces)),
        seq_len=options.seq_len[0],
        max_tokens=options.max_tokens,
        forced=[],
        parts=1,
        cuts={"prefill": 1, "step": 1, "graph": 1},
    )


def _print(options: argparse.Namespace, what: str, rows: list[Row]) -> None:
    what += f", the part of one of {options.part_of} ranks" if options.part_of > 1 else ""
    print(f"{options.shape}, {what}, {options.tensor_parallel} GPUs")
    for row in rows:
        rate = row["nonces"] / (row["prefill"] + options.max_tokens * row["step"])
        print(
            f"{row['nonces']:5} chains  {rate:8.2f}/s {60 * rate:8.0f}/min  prefill {row['prefill']:7.3f} s  step "
            f"{1000 * row['step']:8.3f} ms, one by one {1000 * row['one_by_one']:8.3f}  limit "
            f"{1000 * row['limit']:8.3f} ms: {row['limit'] / row['step']:6.1%}  reads {row['weights'] / 1e9:7.2f} + "
            f"{row['keys_and_values'] / 1e9:6.2f} GB, {row['experts']:.0%} of the experts"
        )
    print(
        json.dumps({"shape": options.shape, "layers": what, "gpus": options.tensor_parallel, "rows": rows}), flush=True
    )


def _options() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.set_defaults(seq_len=[256])
    for action in parser._actions:
        if action.dest == "layers":
            action.nargs, action.help = "+", "only so many of the shape's layers; two numbers: see above"
    parser.add_argument("--nonces", type=int, nargs="+", default=[32, 64, 128, 256], help="chains of a batch")
    parser.add_argument("--max-tokens", type=int, default=256, help="steps of a chain")
    parser.add_argument("--eager-steps", type=int, default=16, help="steps that are measured one by one")
    parser.add_argument("--reserve", type=float, default=20.0, help="GiB for keys and values of chains")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step")
    parser.add_argument("--vllms-tiles", action="store_true", help="leave the experts' tiles as vLLM has them")
    parser.add_argument("--out", type=Path, help="file for the rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
