# SPDX-License-Identifier: Apache-2.0
"""Whether the books of a round balance: what was computed, what arrived, what the status says."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from poc_operator.model.round import Round
from poc_operator.runtime.driver import POLL_SECONDS
from poc_operator.runtime.recording import COUNTERS_SECONDS
from tests.chaos.history import Run, runs_of, slots_of
from tests.simulation.world import World

Interval = tuple[float, float]

#: Seconds for which what a pod told last may be old when it is lost, while the operator and the API server work: the
#: poll interval, and as much again for the poll, the plan and the write on a busy machine.
KNOWLEDGE_SECONDS = 2 * POLL_SECONDS
#: Seconds after the operator's or the API server's return in which nothing can be recorded yet: the next operator
#: starts and gets the lease, a frozen request ends, a connection is made anew.
RECOVERY_SECONDS = 8.0


@dataclass(frozen=True)
class Known:
    """What the operator could know about one slot; ``blind`` are the times in which it could record nothing."""

    round_id: str
    slot: tuple[int, int]
    blind: Sequence[Interval]

    def age(self, before: Run, after: Run) -> float:
        """Return how old the knowledge that the next run began with was at the end of a run, without blind times."""
        told = [
            poll.time
            for poll in before.session.polls
            if (poll.round_id, poll.slot) == (self.round_id, self.slot) and poll.delivered == after.start
        ]
        if after.start == before.start:
            told.append(before.began)
        assert told, f"{self.slot} starts again at {after.start}, which {before.session.pod} never told"
        return sum(end - begin for begin, end in _without(max(told), before.ended, self.blind))


@dataclass
class Findings:
    """What an audit counted."""

    runs: int = 0
    computed: int = 0
    repeated: int = 0
    arrived_twice: int = 0
    oldest_knowledge: float = 0.0


def audit(world: World, round_: Round) -> Findings:
    """Check everything about a round that is over or suspended; an AssertionError tells what is wrong."""
    findings, slots = Findings(), slots_of(round_)
    arrivals = world.receiver.arrivals[round_.spec.block_hash]
    strangers = [nonce for nonce in arrivals if nonce % round_.status.slots not in slots]
    assert not strangers, f"{round_.metadata.name}: nonces of no slot arrived: {strangers[:5]}"
    # What an operator held back when it was killed is lost with it.
    gaps = [(begin - COUNTERS_SECONDS, end) for begin, end in world.operator.gaps]
    blind = merged([*gaps, *world.api_server.outages])
    histories = runs_of(round_, world.kubelet.sessions)
    for assignment in round_.status.assignments:
        offset = assignment.node + assignment.group * round_.spec.nodes.count
        name = f"{round_.metadata.name}, slot {offset}"
        arrived = {slots[offset].index(nonce) for nonce in arrivals if nonce % round_.status.slots == offset}
        missing = set(range(assignment.delivered)) - arrived
        assert not missing, f"{name}: {len(missing)} nonces are lost, the first at index {min(missing)}"
        beyond = arrived - set(range(assignment.delivered))
        assert not beyond, f"{name}: index {max(beyond)} arrived, but delivered is {assignment.delivered}"
        _check_runs(name, Known(round_.id, (assignment.node, assignment.group), blind), histories[offset], findings)
    findings.arrived_twice = sum(count - 1 for count in arrivals.values())
    _check_totals(round_, len(arrivals))
    return findings


def _check_totals(round_: Round, arrived: int) -> None:
    totals, slots = round_.status.totals, round_.status.assignments
    told = (totals.delivered, totals.valid, totals.checked, totals.rejected)
    assert told == (arrived, arrived, arrived, 0), f"{round_.metadata.name}: {totals} but {arrived} arrived"
    assert totals.reissues == sum(slot.attempts - 1 for slot in slots)


def _check_runs(name: str, known: Known, runs: Sequence[Run], findings: Findings) -> None:
    findings.runs += len(runs)
    findings.computed += sum(run.end - run.start for run in runs)
    assert not runs or runs[0].start == 0, f"{name}: begins at {runs[0].start}"
    for before, after in pairwise(runs):
        assert after.began >= before.ended, f"{name}: {before.session.pod} and {after.session.pod} compute it at once"
        assert after.start <= before.end, f"{name}: leaves out {before.end} to {after.start}"
        findings.repeated += before.end - after.start
        age = known.age(before, after)
        findings.oldest_knowledge = max(findings.oldest_knowledge, age)
        assert age <= KNOWLEDGE_SECONDS, (
            f"{name}: given out again at {after.start} of {before.end}, which was {age:.1f} s old at the end of "
            f"{before.session.pod}'s work, not counting outages"
        )


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times in which nothing could be recorded, each with the recovery after it, in order and apart."""
    found = list[Interval]()
    for begin, end in sorted((begin, end + RECOVERY_SECONDS) for begin, end in intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _without(begin: float, end: float, holes: Sequence[Interval]) -> Iterable[Interval]:
    """Yield what is left of the time from ``begin`` to ``end`` without the holes."""
    for hole_begin, hole_end in holes:
        if begin < min(hole_begin, end):
            yield begin, min(hole_begin, end)
        begin = max(begin, hole_end)
    if begin < end:
        yield begin, end
