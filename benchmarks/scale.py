# SPDX-License-Identifier: Apache-2.0
"""python3 -m benchmarks.scale: what many pods, in one round or in many, cost the operator and the API server.

The age of a slot's status is the time since its pod last told the counters that the round shows. CPU is that of the
operator's process; requests are counted by the API server. How late the event loop comes is counted since the start of
the operator, the first list of all pods included. Pods beyond the slots that a round may have are spares.
"""

import argparse
import asyncio
import json
import os
import re
import urllib.request
from collections import Counter
from time import monotonic, process_time

from benchmarks.figures import Figures, report, spread
from hack.cluster.up import kubectl
from poc_operator.apis.v1alpha1.round import MAX_SLOTS, Assignment, PoCRound
from poc_operator.apis.v1alpha1.status import SlotState
from tests.simulation.light import LightSession
from tests.simulation.manifests import round_manifest
from tests.simulation.session import PodServer
from tests.simulation.world import World, world
from tests.support.checks.metrics import parse

START_SECONDS = 300.0
#: Rounds that are created at once.
CREATES = 20
SETTLING_SECONDS = 15.0
SAMPLE_SECONDS = 1.0
#: Samples of many rounds take seconds of the API server and of this process: they wait so many times as long.
SAMPLE_SHARE = 4
#: How much less of a busy core simulated pods get than the operator: real ones have machines of their own.
NICE = 10
#: A fake batch of 16 nonces takes so long, so that the pods leave the machine's cores to the operator.
SECONDS_PER_BATCH = 2.0
_READS = ("GET", "LIST")
_WRITES = ("POST", "PUT", "PATCH", "DELETE", "APPLY")
_SERIES = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.MULTILINE)
_POLL = "poc_operator_poll_seconds"
_LAG = re.compile(r'poc_operator_loop_lag_seconds_bucket\{le="([^"]+)"\}')
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def requests() -> Counter[tuple[str, str]]:
    """Return how many requests the API server has answered, by resource and verb."""
    counts = Counter[tuple[str, str]]()
    for series in _SERIES.finditer(kubectl("get", "--raw", "/metrics")):
        labels = dict(_LABEL.findall(series["labels"]))
        counts[labels["resource"], labels["verb"]] += int(float(series["count"]))
    return counts


def series(fleet: World) -> dict[str, float]:
    """Return the operator's metrics."""
    with urllib.request.urlopen(fleet.operator.metrics_url, timeout=30) as answer:  # noqa: S310 - our own process
        return parse(answer.read().decode())


def lag(found: dict[str, float]) -> float:
    """Return the bound of the histogram below which 99 % of the event loop's lags are, in seconds."""
    within = {float(bound): found[name] for name in found if (bound := _LAG.sub(r"\1", name)) != name}
    return min(bound for bound, count in within.items() if count >= 0.99 * within[float("inf")])


async def start(fleet: World, rounds: int, slots: int) -> Figures:
    """Create the rounds; return how long it took until so many pods computed."""
    created = monotonic()
    spec = {"port": fleet.server.port}
    for first in range(0, rounds, CREATES):
        numbers = range(first, min(first + CREATES, rounds))
        await asyncio.gather(*(fleet.rounds.create(round_manifest(name(n), n, **spec)) for n in numbers))
    began = list[float]()
    while len(began) < slots:
        if monotonic() - created > START_SECONDS:
            raise TimeoutError(f"{len(began)} of {slots} pods were started within {START_SECONDS:.0f} s")
        await asyncio.sleep(0.1)
        began = [session.work[0].began for session in fleet.kubelet.sessions if session.work]
    return {
        "start_first_to_last_seconds": round(max(began) - min(began), 1),
        "start_created_to_last_seconds": round(max(began) - created, 1),
    }


def name(number: int) -> str:
    """Return the name of a round and of the Deployment of its pods."""
    return f"fleet-{number}"


def age(session: PodServer | None, slot: Assignment, now: float) -> float | None:
    """Return the seconds since the pod told what the slot shows; None if it never did."""
    polls = reversed(session.polls) if session is not None else ()
    shown = (slot.next, slot.delivered)
    told = next((poll.time for poll in polls if (poll.next, poll.delivered) == shown), None)
    return now - told if told is not None else None


async def sample(fleet: World, ages: list[float]) -> tuple[int, int]:
    """Add the age of every slot; return how many slots run, and the size of the largest round in bytes."""
    bodies = await fleet.rounds.bodies()
    now, running, largest = monotonic(), 0, 0
    for body in bodies:
        largest = max(largest, len(json.dumps(body, separators=(",", ":"))))
        for slot in PoCRound.parse(body).status.assignments:
            running += slot.state is SlotState.RUNNING
            found = age(fleet.kubelet.session_of(slot.uid or ""), slot, now)
            ages += [found] if found is not None else []
    return running, largest


async def steady(fleet: World, slots: int, seconds: float) -> Figures:
    """Watch the rounds for ``seconds``."""
    ages, sizes, memory = list[float](), list[int](), list[int]()
    before, told = await asyncio.to_thread(requests), await asyncio.to_thread(series, fleet)
    cpu, own, began = fleet.operator.cpu_seconds, process_time(), monotonic()
    while (now := monotonic()) - began < seconds:
        running, largest = await sample(fleet, ages)
        if running != slots:
            print(f"{monotonic() - began:.0f} s: {running} of {slots} slots run")
        sizes.append(largest)
        memory.append(fleet.operator.rss_bytes)
        await asyncio.sleep(max(SAMPLE_SECONDS, SAMPLE_SHARE * (monotonic() - now)))
    wall = monotonic() - began
    cpu, own = fleet.operator.cpu_seconds - cpu, process_time() - own
    after, tells = await asyncio.to_thread(requests), await asyncio.to_thread(series, fleet)
    polls, polling = (tells[name] - told[name] for name in (f"{_POLL}_count", f"{_POLL}_sum"))
    counts = {key: (after[key] - before[key]) / wall for key in after}
    return {
        **spread("status_age_seconds", ages),
        "operator_cores": round(cpu / wall, 2),
        "simulation_cores": round(own / wall, 2),
        "loop_lag_seconds_p99_at_most": lag(tells),
        "poll_seconds_mean": round(polling / polls, 2),
        "operator_rss_mib": round(max(memory) / 2**20, 1),
        "round_kib": round(max(sizes) / 2**10, 1),
        "round_writes_per_second": round(_rate(counts, PoCRound.KIND.plural), 2),
        "round_reads_per_second": round(counts.get((PoCRound.KIND.plural, "GET"), 0), 2),
        "reads_per_second_all_clients": round(sum(counts[key] for key in counts if key[1] in _READS), 2),
        "event_writes_per_second_all_clients": round(_rate(counts, "events"), 2),
        "lease_writes_per_second_all_clients": round(_rate(counts, "leases"), 2),
        "operators_ended": len(fleet.operator.gaps),
    }


def _rate(counts: dict[tuple[str, str], float], resource: str) -> float:
    return sum(counts.get((resource, verb), 0) for verb in _WRITES)


async def program(rounds: int, pods: int, seconds: float, niceness: int) -> None:
    """Measure and print; the operator has this ``niceness``."""
    fleets = {name(number): pods for number in range(rounds)}
    options = ("--identity=benchmark",)
    async with (
        world(fleets, seconds_per_batch=SECONDS_PER_BATCH, operator_options=options, pod_server=LightSession) as fleet,
        fleet.operator.running(),
    ):
        fleet.operator.prefer(niceness)
        os.nice(NICE)  # of this thread, in which the pods are, and not of the operator
        await asyncio.sleep(SETTLING_SECONDS)
        slots = rounds * min(pods, MAX_SLOTS)
        starts = await start(fleet, rounds, slots)
        await asyncio.sleep(SETTLING_SECONDS)
        figures = await steady(fleet, slots, seconds)
        report(f"{rounds} rounds of {pods} pods, {seconds:.0f} s, operator at nice {niceness}", {**starts, **figures})


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.scale", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pods", type=int, default=1000, help="pods of each round (default: 1000)")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="niceness of the operator (default: 0). Below 0, which only root may set, it comes before the API server "
        "and etcd, as where those have machines of their own",
    )
    options = parser.parse_args()
    asyncio.run(program(options.rounds, options.pods, options.seconds, options.nice))


if __name__ == "__main__":
    main()
