# SPDX-License-Identifier: Apache-2.0
"""PYTHONPATH=image:. python3 -m benchmarks.gpu_layers [--shape NAME]: layer by layer, how far two passes are apart.

Compares the pod's pass with vLLM's own, and either with itself over other batches. Once each layer reads what the one
before it made, and once all read what vLLM's own pass made of the same nonces: then a difference is the layer's alone.
Needs vLLM and an NVIDIA GPU; weights are random.
"""

from __future__ import annotations

import json

from benchmarks.gpu import options_of, served
from benchmarks.gpu_pod import call, described
from tests.support.builders.batches import a_batch


def main() -> None:
    """Measure as the command line says, and print a table and the same as JSON."""
    parser = options_of(__doc__)
    parser.add_argument("--nonces", type=int, default=4)
    options = parser.parse_args()
    model, _ = served(options, extension="benchmarks.gpu_layer_worker.LayerExtension")
    call(model, "poc_bench_weights")
    facts = described(model)
    print(json.dumps(facts), flush=True)
    for seq_len in options.seq_len:
        found = call(model, "poc_bench_layers", a_batch(range(options.nonces), seq_len=seq_len))
        for passes, layers in found.items():
            print(f"seq_len {seq_len}, {passes}", flush=True)
            for number, parts in enumerate(layers):
                told = "  ".join(f"{part} {error:.2e} ({share:.2%})" for part, (error, share) in parts.items())
                print(f"  layer {number:2}  {told}", flush=True)
        print(json.dumps({"shape": options.shape, "layers": options.layers, "seq_len": seq_len, "apart": found}))


if __name__ == "__main__":
    main()
