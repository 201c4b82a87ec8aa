# SPDX-License-Identifier: Apache-2.0
"""PYTHONPATH=image:. python3 -m benchmarks.first_artifact: how soon a round's first artifacts come while chat is busy.

Starts a server as users do and sends it many chats at once. When their answers flow, a round begins. Measured is the
time from its request until the receiver has the first artifacts, and which chats are in flight then. The first round of
a server also prepares its passes. Settings of the server are taken from the environment (VLLM_POC_…). Every chat must
get all of its tokens. Processes of their own chat, so that none of them is too busy to read what comes.
"""

import argparse
import asyncio
import shlex
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import aiohttp

from benchmarks.chat import SHAPE_FLAGS, server_options
from benchmarks.chat_load import Lengths, Load, Streamed
from benchmarks.chat_model import write_model
from benchmarks.figures import Figures, report
from benchmarks.receiver import accepting, arrivals
from tests.vllm.client import K_DIM, Client
from tests.vllm.server import MODEL_NAME, serving

#: So many tokens each chat has got on average before a round begins, by the server's own count.
TOKENS_BEFORE = 4
TOKENS = "vllm:generation_tokens_total"
REQUESTS = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
WAIT_SECONDS = 120.0
LOOK_SECONDS = 0.05
#: Each process has so many numbers for its prompts, which no other process or round uses.
PROMPT_NUMBERS = 10_000


#: Where this process waits for the others before it sends chats.
_barriers = list[Barrier]()


def wait_at(barrier: Barrier) -> None:
    """Let this process send no chats before all have come to the barrier."""
    _barriers.append(barrier)


class Chats(NamedTuple):
    """What one process sends: so many chats at once, whose prompts carry numbers from the first on."""

    base: str
    chats: int
    first: int
    lengths: Lengths

    def run(self) -> list[Streamed]:
        """Chat, and tell when each chat was sent and answered; RuntimeError if one did not get all of its tokens."""
        return asyncio.run(self._run())

    async def _run(self) -> list[Streamed]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(self.base, connector=connector, timeout=aiohttp.ClientTimeout()) as session:
            load = Load(session, MODEL_NAME, self.lengths, self.first)
            await load.fit_prompt()
            await asyncio.to_thread(_barriers[0].wait, WAIT_SECONDS)
            return await load.regularly(self.chats, 0.0, str(self.first))


class Bench:
    """The measurements on one server."""

    def __init__(self, server: Client, receiver: str, options: argparse.Namespace) -> None:
        self._server = server
        self._receiver = receiver
        self._options = options

    async def run(self) -> None:
        """Measure and print each round."""
        context, processes = get_context("spawn"), self._options.processes
        ready = context.Barrier(processes)
        with ProcessPoolExecutor(processes, context, wait_at, (ready,)) as pool:
            for number in range(self._options.rounds):
                report(f"round {number}", await self._measured(pool, number))

    async def _measured(self, pool: ProcessPoolExecutor, number: int) -> Figures:
        """Chat, begin a round meanwhile, and stop it when its first artifacts have come."""
        before, count, loop = self._server.metric(TOKENS), self._options.chats, asyncio.get_running_loop()
        chats = asyncio.gather(*(loop.run_in_executor(pool, one.run) for one in self._shares(number)))
        end = time.monotonic() + WAIT_SECONDS
        while not await asyncio.to_thread(self._flow, before):
            never = f"the server never had {count} chats at once: ask for more tokens (--output)"
            await self._look(chats, end, never)
            if chats.done():
                raise RuntimeError(never)
        begun = time.monotonic()
        print(f"round {number}: the answers of {count} chats flow", flush=True)
        answered, first = await asyncio.gather(self._start(number), self._first_after(begun, chats))
        print(f"round {number}: its first artifacts came after {first - begun:.3f} s", flush=True)
        await asyncio.to_thread(self._server.stop)
        streamed = [chat for share in await chats for chat in share]
        return {
            "answered_seconds": round(answered - begun, 3),
            "first_artifacts_seconds": round(first - begun, 3),
            "chats_in_flight_before": in_flight(streamed, begun),
            "chats_in_flight_then": in_flight(streamed, first),
        }

    def _flow(self, tokens_before: float) -> bool:
        """Whether the server has all chats, and answers them."""
        here, count = sum(map(self._server.metric, REQUESTS)), self._options.chats
        return bool(here >= count and self._server.metric(TOKENS) - tokens_before >= TOKENS_BEFORE * count)

    def _shares(self, number: int) -> list[Chats]:
        """Return what each process sends, with prompts that no other process and no earlier round has."""
        options = self._options
        share, more = divmod(options.chats, options.processes)
        lengths = Lengths(options.prompt, options.output, options.output)
        first = number * options.processes * PROMPT_NUMBERS
        return [
            Chats(self._server.base, share + (process < more), first + process * PROMPT_NUMBERS, lengths)
            for process in range(options.processes)
        ]

    async def _start(self, number: int) -> float:
        """Start a round; return when that was answered."""
        options = self._options
        params = {"model": MODEL_NAME, "seq_len": options.seq_len, "k_dim": K_DIM}
        fields = {"block_hash": f"{number:064x}", "url": self._receiver, "batch_size": options.batch, "params": params}
        await asyncio.to_thread(self._server.start, **fields)
        return time.monotonic()

    async def _first_after(self, begun: float, chats: "asyncio.Future[list[list[Streamed]]]") -> float:
        """Return when the first delivery after this moment came."""
        while True:
            came = [moment for moment in await asyncio.to_thread(arrivals, self._receiver) if moment >= begun]
            if came:
                return min(came)
            await self._look(chats, begun + WAIT_SECONDS, f"no artifact came: {self._server.status()}")

    async def _look(self, chats: "asyncio.Future[list[list[Streamed]]]", end: float, trouble: str) -> None:
        """Wait a moment; RuntimeError with the trouble if it lasts, and a chat's error if one has failed."""
        await asyncio.sleep(LOOK_SECONDS)
        if chats.done():
            chats.result()
        if time.monotonic() > end:
            raise RuntimeError(trouble)


def in_flight(chats: list[Streamed], moment: float) -> int:
    """Return how many chats were sent and not answered in full by then."""
    return sum(chat.sent <= moment < chat.last for chat in chats)


def main() -> None:
    """Measure as the command line says."""
    options = _options()
    folder = Path(mkdtemp())
    model = options.model or write_model(options.shape, folder / "model", layers=options.layers, ranks=options.part_of)
    flags = ["--enable-poc"] if options.model else [*SHAPE_FLAGS, "--gpu-memory-utilization", str(options.memory)]
    flags += ["--num-gpu-blocks-override", str(options.blocks)]
    flags += ["--max-model-len", str(max(options.seq_len, options.prompt + options.output))]
    flags += [*(["--enforce-eager"] if options.enforce_eager else []), *shlex.split(options.flags)]
    print(f"the server's log: {folder / 'server.log'}", flush=True)
    begun = time.monotonic()
    with accepting() as receiver, serving(model, folder / "server.log", flags) as server:
        if options.model is None:
            server.workers("poc_bench_weights")
        print(f"the server was ready after {time.monotonic() - begun:.0f} s", flush=True)
        asyncio.run(Bench(server, receiver, options).run())


def _options() -> argparse.Namespace:
    parser = server_options(__doc__, memory=0.8)
    parser.add_argument("--blocks", type=int, default=49_152, help="of chat's KV cache, of 16 tokens each")
    parser.add_argument("--chats", type=int, default=1500, help="that are sent at once")
    parser.add_argument("--processes", type=int, default=8, help="that share the chats")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument(
        "--output", type=int, default=1400, help="tokens of an answer; all chats have come before one ends"
    )
    parser.add_argument("--rounds", type=int, default=3, help="one after the other, each beside chats of its own")
    parser.add_argument("--seq-len", type=int, default=1024, help="of the round")
    parser.add_argument("--batch", type=int, default=32, help="the round's batch size")
    return parser.parse_args()


if __name__ == "__main__":
    main()
