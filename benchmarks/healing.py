# SPDX-License-Identifier: Apache-2.0
"""python3 -m benchmarks.healing: how soon lost work is given out again, and how soon a new operator takes over.

Restarts: from the moment at which the API server calls a restarted pod Ready to its first batch of the round.
Adoptions: from the start of an operator's process, after the one before was killed, to the first status that it wrote,
in which every slot is Running.
"""

import argparse
import asyncio
from random import Random
from time import monotonic

from benchmarks.figures import report, spread
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import SlotState
from tests.simulation.manifests import round_manifest
from tests.simulation.world import World, world

FLEET = "fleet"
PODS = 10
WAIT_SECONDS = 60.0


def works(round_: PoCRound) -> bool:
    """Whether every slot is computed."""
    slots = round_.status.assignments
    return bool(slots) and all(slot.state is SlotState.RUNNING for slot in slots)


async def restart(fleet: World, random: Random) -> float:
    """Restart a pod; return the seconds from Ready to its first batch."""
    await asyncio.sleep(random.uniform(3, 6))
    pod = random.choice(fleet.kubelet.pods)
    await fleet.kubelet.restart(pod.uid, random.uniform(0.5, 5))
    deadline = monotonic() + WAIT_SECONDS
    while monotonic() < deadline:
        session, ready = fleet.kubelet.session_of(pod.uid), fleet.kubelet.told_ready.get(pod.uid)
        if session is not None and session.work and ready is not None:
            return session.work[0].began - ready
        await asyncio.sleep(0.01)
    raise TimeoutError(f"{pod.name} was not started again within {WAIT_SECONDS:.0f} s")


async def adoption(fleet: World, random: Random) -> float:
    """Kill the operator; return the seconds from the next one's start to its first status with all slots Running."""
    await asyncio.sleep(random.uniform(3, 6))
    await fleet.operator.kill(0)
    began = fleet.operator.gaps[-1][1]
    before = (await fleet.rounds.get(FLEET)).metadata.resource_version
    await fleet.rounds.wait_until(FLEET, lambda r: works(r) and r.metadata.resource_version != before, WAIT_SECONDS)
    return monotonic() - began


async def program(restarts: int, kills: int, seed: int) -> None:
    """Measure and print."""
    random = Random(seed)  # noqa: S311 - not for secrets
    fleets, same_name = {FLEET: PODS}, ("--identity=benchmark",)
    async with world(fleets, seconds_per_batch=0.2, operator_options=same_name) as fleet, fleet.operator.running():
        await fleet.rounds.create(round_manifest(FLEET, 1, port=fleet.server.port))
        await fleet.rounds.wait_until(FLEET, works, WAIT_SECONDS)
        restarted = [await restart(fleet, random) for _ in range(restarts)]
        report(f"{restarts} restarts of one of {PODS} pods", spread("retry_seconds", restarted))
        adopted = [await adoption(fleet, random) for _ in range(kills)]
        report(f"{kills} operators killed", spread("adoption_seconds", adopted))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.healing", description=__doc__)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(program(options.restarts, options.kills, options.seed))


if __name__ == "__main__":
    main()
