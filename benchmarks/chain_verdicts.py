# SPDX-License-Identifier: Apache-2.0
"""PYTHONPATH=image:. python3 -m benchmarks.chain_verdicts [--family dense]: what tau tells honest chains from others.

Real servers on a CPU mine chains of the decode scheme: honest ones in float32 and in bfloat16, and cheats. Both honest
servers then validate all claims by ``POST generate``, also in batches of another size. Printed is, for each tau, how
many nonces mismatch, and whether that is fraud by the network's test. Margins do not depend on tau, so one validation
tells of all. Models are small and their weights random; needs vLLM.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any, NamedTuple

from benchmarks.chain_models import FAMILIES, write_models
from benchmarks.figures import quantile
from tests.vllm.client import Client
from tests.vllm.server import MODEL_NAME, serving
from vllm_poc.wire.stat_test import ChainComparison, StatTest, is_fraud

#: Thresholds; the network's is 0.025.
TAUS = (0.0, 0.0025, 0.01, 0.025, 0.1)
DTYPES = ("float32", "bfloat16")
#: Largest batch where batches are to be smaller than the request. From 32 down it would not count.
SMALL_BATCH = 40
FLAGS = ("--enforce-eager", "--enable-poc", "--max-num-seqs", "256", "--max-num-batched-tokens", "4096")
ENVIRONMENT = {"VLLM_POC_DECODE_REBUILD_CODEBOOK": "1", "VLLM_POC_DECODE_RESERVE_BYTES": str(2**30)}

Artifacts = Sequence[Mapping[str, Any]]


class Case(NamedTuple):
    """Claims that a server validates."""

    validator: str
    prover: str
    honest: bool


class Bench:
    """Asks servers of one model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._nonces = list(range(options.nonces))
        self._params = {
            "model": MODEL_NAME,
            "seq_len": options.seq_len,
            "decode": True,
            "max_tokens": options.steps,
        }

    def mined(self, server: Client) -> Artifacts:
        """Return what a prover sends of the nonces."""
        found = server.generate(nonces=self._nonces, params=self._params)["artifacts"]
        return [{name: one[name] for name in ("nonce", "vector_b64", "k_points_steps")} for one in found]

    def compared(self, server: Client, claims: Artifacts, **fields: Any) -> list[ChainComparison]:  # noqa: ANN401
        """Return how each claimed chain compares with the server's."""
        validation = {"artifacts": claims}
        found = server.generate(nonces=self._nonces, params=self._params, validation=validation, **fields)["per_nonce"]
        names = ("n_steps", "n_sphere_mismatches", "mismatch_margin_max")
        return [ChainComparison(*(one[name] for name in names)) for one in found]


def main() -> None:
    """Measure as the command line says, and print a line for each case and a summary."""
    options, begun = _options(), monotonic()
    folder = Path(mkdtemp())
    cases = dict(_cases(options, folder))
    print(f"{options.family}, {options.nonces} chains of {options.seq_len} tokens and {options.steps} steps")
    print(
        f"| validator | prover | other indices | largest margin, p50 | p99 | {' | '.join(f'tau {t}' for t in TAUS)} |"
    )
    print("| --- " * (5 + len(TAUS)) + "|")
    for case, compared in cases.items():
        print(_line(case, compared))
    for wrong, honest in (("rejected", True), ("accepted", False)):
        chosen = [compared for case, compared in cases.items() if case.honest is honest]
        told = [sum(_fraud(compared, tau) is honest for compared in chosen) for tau in TAUS]
        who = "honest provers" if honest else "cheats"
        print(f"of {len(chosen)} {who} {wrong}: " + ", ".join(f"{n} at {t}" for n, t in zip(told, TAUS, strict=True)))
    print(f"{monotonic() - begun:.0f} s")


def _cases(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Case, list[ChainComparison]]]:
    bench, written = Bench(options), write_models(options.family, folder)
    claims: dict[str, Artifacts] = {}
    for name, model in written.items():
        if name != "the model":
            with serving(model, folder / f"{name}.log", [*FLAGS, "--dtype", "bfloat16"], ENVIRONMENT) as server:
                claims[name] = bench.mined(server)
    with ExitStack() as stack:
        honest = {}
        for dtype in DTYPES:
            log = folder / f"{dtype}.log"
            honest[dtype] = stack.enter_context(
                serving(written["the model"], log, [*FLAGS, "--dtype", dtype], ENVIRONMENT)
            )
            claims[dtype] = bench.mined(honest[dtype])
        for validator, server in honest.items():
            for prover, chains in claims.items():
                yield Case(validator, prover, prover in DTYPES), bench.compared(server, chains)
            small = bench.compared(server, claims[validator], batch_size=SMALL_BATCH)
            yield Case(validator, f"{validator}, other batches", honest=True), small


def _line(case: Case, compared: Sequence[ChainComparison]) -> str:
    other = sum(one.n_disagreements for one in compared) / sum(one.n_steps for one in compared)
    margins = [one.margin_max for one in compared]
    told = [
        f"{sum(one.is_mismatch(tau) for one in compared)} {'fraud' if _fraud(compared, tau) else 'pass'}"
        for tau in TAUS
    ]
    cells = [f"{other:.2%}", f"{quantile(margins, 0.5):.4f}", f"{quantile(margins, 0.99):.4f}", *told]
    return f"| {case.validator} | {case.prover} | {' | '.join(cells)} |"


def _fraud(compared: Sequence[ChainComparison], tau: float) -> bool:
    """Whether the network's test with its defaults calls so many mismatches fraud."""
    test, wrong = StatTest(), sum(one.is_mismatch(tau) for one in compared)
    return is_fraud(wrong, len(compared), p_mismatch=test.p_mismatch, fraud_threshold=test.fraud_threshold)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, default="dense")
    parser.add_argument("--nonces", type=int, default=100)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=256, help="of each chain, beside the prefill")
    return parser.parse_args()


if __name__ == "__main__":
    main()
