# SPDX-License-Identifier: Apache-2.0
"""python3 -m tests.simulation: a fleet of simulated pods on the local cluster, and an operator, until Ctrl-C."""

import argparse
import asyncio
import contextlib

from tests.simulation.manifests import round_manifest
from tests.simulation.world import world

FLEET = "fleet"


async def program(pods: int, seconds_per_batch: float) -> None:
    """Run the fleet with one round and print how the round does."""
    async with world({FLEET: pods}, seconds_per_batch=seconds_per_batch) as made, made.operator.running():
        await made.rounds.create(round_manifest(FLEET, 1, port=made.server.port, callbackURL=made.receiver.url))
        print(f"kubectl --namespace {made.namespace} get pocrounds; the operator's log is {made.operator.log}")  # noqa: T201
        while True:
            await asyncio.sleep(5)
            status = (await made.rounds.get(FLEET)).status
            print(f"{status.state}: {status.message}; {status.totals.delivered} nonces delivered", flush=True)  # noqa: T201


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.simulation", description=__doc__)
    parser.add_argument("--pods", type=int, default=20, help="how many pods (default: 20)")
    parser.add_argument("--seconds-per-batch", type=float, default=0.5, help="speed of a pod: 16 nonces in so long")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(program(options.pods, options.seconds_per_batch))


if __name__ == "__main__":
    main()
