# SPDX-License-Identifier: Apache-2.0
"""Who computed which nonces of a slot, and when: the sessions' records, put in order."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from poc_operator.apis.v1alpha1.round import PoCRound
from tests.simulation.engine import Work
from tests.simulation.session import PodServer
from vllm_poc.wire.partition import NonceSlot

Slots = dict[int, NonceSlot]  # by offset


@dataclass
class Run:
    """Neighbouring nonces that one session computed one after the other: indices ``start`` up to ``end``."""

    session: PodServer
    start: int
    end: int
    began: float
    ended: float


async def ended(round_: PoCRound, sessions: Iterable[PodServer], seconds: float = 30.0) -> None:
    """Wait for what sessions have begun for a round: a slice under way at its stop is computed to its end."""
    async with asyncio.timeout(seconds):
        while any(_goes_on(one, session, round_) for session in sessions for one in session.work):  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.05)


def _goes_on(work: Work, session: PodServer, round_: PoCRound) -> bool:
    return work.block_hash == round_.spec.block_hash and work.ended is None and session.died is None


def slots_of(round_: PoCRound) -> Slots:
    """Return the round's residue classes."""
    count, groups = round_.spec.nodes.count, round_.status.groups
    slots = [
        NonceSlot(node_id=slot.node, node_count=count, group_id=slot.group, n_groups=groups)
        for slot in round_.status.assignments
    ]
    return {slot.offset: slot for slot in slots}


def chain_length(round_: PoCRound) -> int:
    """Return how many indices each result of the round has; 0 for a vector."""
    return round_.spec.decode.max_tokens + 1 if round_.spec.decode is not None else 0


def runs_of(round_: PoCRound, sessions: Iterable[PodServer]) -> dict[int, list[Run]]:
    """Return the runs of each slot (by offset) in the order in which they began.

    What a session computes on after another one has begun is a run of its own. A batch that mixes slots, leaves out a
    nonce, or is of no slot or another scheme than the round fails the test.
    """
    slots, runs = slots_of(round_), defaultdict[int, list[Run]](list)
    works = [(work, session) for session in sessions for work in session.work]
    for work, session in sorted(works, key=lambda one: one[0].began):
        if work.block_hash != round_.spec.block_hash:
            continue
        assert work.chain_length == chain_length(round_), f"a batch is of another scheme: {work}"
        offset = work.nonces[0] % round_.status.slots
        index = slots[offset].index(work.nonces[0])
        assert work.nonces == slots[offset].nonces(index, len(work.nonces)), "a batch is not of one slot"
        last = runs[offset][-1] if runs[offset] else None
        if last is None or last.session is not session or last.end != index:
            last = Run(session, index, index, work.began, work.began)
            runs[offset].append(last)
        _extend(last, work, session)
    return runs


def _extend(run: Run, work: Work, session: PodServer) -> None:
    ended = work.ended if work.ended is not None else session.died
    assert ended is not None, "the audit comes after the end of all work"
    run.ended = ended
    if work.done:
        run.end += len(work.nonces)


def timeline(runs: Iterable[Run], since: float) -> str:
    """Return a line for each run, for a person who looks for the cause of a failure; times are from ``since`` on."""
    return "\n".join(
        f"{run.began - since:7.1f} to {run.ended - since:6.1f} s: {run.session.pod}, "
        f"born at {run.session.born - since:.1f} s, computes {run.start} to {run.end}"
        + (f", dies at {run.session.died - since:.1f} s" if run.session.died is not None else "")
        for run in runs
    )
