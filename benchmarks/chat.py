# SPDX-License-Identifier: Apache-2.0
"""PYTHONPATH=image:. python3 -m benchmarks.chat [--shape NAME | --model FOLDER]: what chat and PoC do to each other.

Starts a server as users do and measures in turns on the idle server and beside a round, so that drift does not count:
the time to the first token of a chat that comes each 250 ms, PoC's rate between these chats against its rate without
chat, and the tokens per second of many clients. Some answers are compared token by token, with a pause before each, in
which PoC computes. The shape gets random weights of real size, which needs a GPU; a folder is served as it is. Settings
of the server are taken from the environment (VLLM_POC_…). With --decode, rounds are of the decode scheme, whose
settings are among these.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import ne
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp

from benchmarks.chat_figures import Answers, Measured, Nonces, Side, table
from benchmarks.chat_load import Lengths, Load, seconds_without
from benchmarks.gpu_shapes import PART_OF, SHAPES
from benchmarks.receiver import accepting
from tests.vllm.client import K_DIM, Client
from tests.vllm.device import ON_GPU
from tests.vllm.server import MODEL_NAME, serving

#: Each half measures everything once.
HALVES = 2
WARM_UP_CHATS = 8
WARM_UP_SECONDS = 1.0
#: The first round also prepares forward passes.
FIRST_SLICES_SECONDS = 120.0
#: Of each answer that is compared.
ANSWER_TOKENS = 32
#: Before each of them: chat that comes back to back keeps PoC from computing at all.
ANSWER_PAUSE_SECONDS = 0.2
#: A connection without use is given up this soon, since vLLM closes it after 5.
KEEP_SECONDS = 3.0
#: For many clients at once.
KV_BLOCKS = 4096
SHAPE_FLAGS = ["--load-format", "dummy", "--worker-extension-cls", "benchmarks.gpu_worker.MeasuringExtension"]
SHAPE_FLAGS += ["--middleware", "vllm_poc.server.app.PocMiddleware"]


def main() -> None:
    """Measure as the command line says, and print a table and the same as JSON."""
    from benchmarks.chat_model import write_model  # noqa: PLC0415 - needs the worker environment

    options, begin = _options(), time.monotonic()
    folder = Path(mkdtemp())
    model = options.model or write_model(options.shape, folder / "model", layers=options.layers, ranks=options.part_of)
    print(f"the server's log: {folder / 'server.log'}", flush=True)
    with accepting() as receiver, serving(model, folder / "server.log", _flags(options)) as server:
        _say(begin, "the server is ready")
        if options.model is None:
            server.workers("poc_bench_weights")
        found = asyncio.run(Bench(server, receiver, options, begin).run())
        facts = server.status()["model"]
    figures = found.figures()
    _say(begin, "all is measured")
    print(table(figures))
    print(json.dumps({"options": vars(options), "model": facts, **figures}, default=str))


class Bench:
    """The measurements on one server."""

    def __init__(self, server: Client, receiver: str, options: argparse.Namespace, begin: float) -> None:
        self._server = server
        self._receiver = receiver
        self._options = options
        self._begin = begin

    async def run(self) -> Measured:
        """Warm up, then measure everything in each half."""
        options, found = self._options, Measured()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS)
        async with aiohttp.ClientSession(self._server.base, connector=connector) as session:
            load = Load(session, MODEL_NAME, Lengths(options.prompt, *options.output))
            await load.fit_prompt()
            await self._measure(load, Measured(), "warm-up", chats=WARM_UP_CHATS, seconds=WARM_UP_SECONDS)
            _say(self._begin, f"warm; a prompt has {load.prompt_tokens} tokens")
            gc.collect()
            gc.freeze()  # or later collections would hold up a chat
            for half in range(HALVES):
                await self._measure(load, found, f"half {half}", chats=options.chats // HALVES, seconds=options.seconds)
                _say(self._begin, f"half {half + 1} of {HALVES} is measured")
        found.answers = self._compare_answers()
        return found

    def _compare_answers(self) -> Answers:
        """Ask the idle server some questions, and again beside a round."""
        questions = [f"Question {number}" for number in range(self._options.answers)]
        for question in questions:  # so that both find the same in the prefix cache
            self._server.chat(question, tokens=ANSWER_TOKENS)
        idle = [self._answer(question) for question in questions]
        with self._round("answers"):
            beside = [self._answer(question) for question in questions]
        return Answers(len(questions), sum(map(ne, idle, beside)))

    def _answer(self, question: str) -> list[int]:
        time.sleep(ANSWER_PAUSE_SECONDS)
        return self._server.chat(question, tokens=ANSWER_TOKENS)

    async def _measure(self, load: Load, found: Measured, seed: str, *, chats: int, seconds: float) -> None:
        found.idle.chats.append(await load.regularly(chats, self._options.interval, seed))
        with self._round(seed):
            await self._compute_alone(found)
            before, begin, held_before = self._progress()
            streamed = await load.regularly(chats, self._options.interval, seed)
            after, end, held = self._progress()
            found.beside.chats.append(streamed)
            found.between.add(after - before, seconds_without(streamed, begin, end))
            found.not_held.add(after - before, end - begin - (held - held_before))
            await self._compute_alone(found)
        for turn in range(self._options.turns):
            await self._take_turns(load, found, f"{seed}, turn {turn}", seconds, idle_first=turn % 2 == 0)

    async def _take_turns(self, load: Load, found: Measured, seed: str, seconds: float, *, idle_first: bool) -> None:
        """Let clients chat without pause on the idle server and beside a round."""
        if idle_first:
            await self._saturate(load, found.idle, seed, seconds)
        with self._round(seed), self._counting(found.meanwhile):
            await self._saturate(load, found.beside, seed, seconds)
        if not idle_first:
            await self._saturate(load, found.idle, seed, seconds)

    async def _saturate(self, load: Load, side: Side, seed: str, seconds: float) -> None:
        for clients in self._options.clients:
            side.rates[clients].append(await load.without_pause(clients, seconds, seed))
            side.client_share = max(side.client_share, load.share_of_a_core)

    async def _compute_alone(self, found: Measured) -> None:
        with self._counting(found.alone):
            await asyncio.sleep(self._options.alone)

    @contextmanager
    def _counting(self, nonces: Nonces) -> Iterator[None]:
        """Add what the round computes while the context lasts."""
        before, begin, _ = self._progress()
        yield
        after, end, _ = self._progress()
        nonces.add(after - before, end - begin)

    @contextmanager
    def _round(self, name: str) -> Iterator[None]:
        """Run a round while the context lasts, from its second slice on."""
        params = _params(self._options)
        name = hashlib.sha256(name.encode()).hexdigest()
        self._server.start(block_hash=name, url=self._receiver, batch_size=self._options.batch, params=params)
        limit = time.monotonic() + FIRST_SLICES_SECONDS
        while (computed := self._progress()[0]) <= self._options.batch:
            if time.monotonic() >= limit:
                raise SystemExit(
                    f"the round computed {computed} nonces in {FIRST_SLICES_SECONDS:.0f} s: nothing to measure"
                )
            time.sleep(0.1)
        yield
        self._server.stop()

    def _progress(self) -> tuple[int, float, float]:
        """Return how many nonces the round has computed, when, and how long chat has held it back."""
        status = self._server.status()
        if status["state"] != "GENERATING":
            raise SystemExit(f"the round does not run: {status}")
        return status["total_checked"], time.monotonic(), status["held_back_seconds"]


def _params(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of a round."""
    params = {"model": MODEL_NAME, "seq_len": options.seq_len}
    return params | ({"k_dim": K_DIM} if options.decode is None else {"decode": True, "max_tokens": options.decode})


def _flags(options: argparse.Namespace) -> list[str]:
    flags = ["--num-gpu-blocks-override", str(KV_BLOCKS)]
    if ON_GPU:
        flags += ["--gpu-memory-utilization", str(options.memory)]
    if options.enforce_eager:
        flags.append("--enforce-eager")
    return [*flags, *(["--enable-poc"] if options.model else SHAPE_FLAGS), *shlex.split(options.flags)]


def _say(begin: float, what: str) -> None:
    print(f"{time.monotonic() - begin:6.1f} s  {what}", flush=True)


def server_options(description: str | None, *, memory: float) -> argparse.ArgumentParser:
    """Return a parser with the options of the server that is measured; ``memory`` is its default share of the GPU's."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    served.add_argument("--model", type=Path, help="a folder with weights and a tokenizer that knows chats")
    parser.add_argument("--layers", type=int, help="only so many of the shape's layers")
    parser.add_argument("--part-of", type=int, default=1, metavar="RANKS", help=PART_OF)
    parser.add_argument("--enforce-eager", action="store_true", help="neither compile nor capture CUDA graphs")
    parser.add_argument("--memory", type=float, default=memory, help="share of the GPU's memory for vLLM")
    parser.add_argument("--flags", default="", help="more flags of the server, as one word")
    return parser


def _options() -> argparse.Namespace:
    parser = server_options(__doc__, memory=0.5)
    parser.add_argument("--chats", type=int, default=200, help="regular ones, on the idle server and beside PoC each")
    parser.add_argument("--interval", type=float, default=0.25, help="seconds from one chat to the next")
    parser.add_argument("--alone", type=float, default=1.0, help="seconds of PoC without chat, four times")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--output", type=int, nargs=2, default=[16, 64], help="least and most tokens of an answer")
    parser.add_argument("--clients", type=int, nargs="*", default=[32], help="that chat without pause")
    parser.add_argument("--seconds", type=float, default=3.0, help="for which they do, each time")
    parser.add_argument("--turns", type=int, default=3, help="that they take, idle and beside PoC, in each half")
    parser.add_argument("--answers", type=int, default=8, help="that are compared with those of the idle server")
    parser.add_argument("--seq-len", type=int, default=64, help="of the round")
    parser.add_argument("--decode", type=int, metavar="STEPS", help="of a chain, in rounds of the decode scheme")
    parser.add_argument("--batch", type=int, default=32, help="the round's batch size")
    options = parser.parse_args()
    if options.model is not None:
        options.shape = None
    return options


if __name__ == "__main__":
    main()
