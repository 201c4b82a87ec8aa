# SPDX-License-Identifier: Apache-2.0
"""Whether the books of a round balance: what was computed, what arrived, what the status says."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from poc_operator.apis.v1alpha1.round import Assignment, PoCRound
from poc_operator.controller.reconciler import POLL_SECONDS
from poc_operator.controller.stored_object import COUNTERS_SECONDS
from tests.chaos.history import Run, chain_length, runs_of, slots_of, timeline
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
    #: Whether a gateway knows more than the pods told last.
    gateway: bool

    def age(self, before: Run, after: Run) -> float:
        """Return how old the knowledge that the next run began with was at the end of a run, without blind times.

        Infinite if the pod never told where the next run began.
        """
        told = [
            poll.time
            for poll in before.session.polls
            if (poll.round_id, poll.slot) == (self.round_id, self.slot) and self._knew(poll.delivered, after.start)
        ]
        if after.start == before.start:
            told.append(before.began)
        if not told:
            return inf
        return sum(end - begin for begin, end in _without(max(told), before.ended, self.blind))

    def _knew(self, told: int, start: int) -> bool:
        return told <= start if self.gateway else told == start


@dataclass
class Findings:
    """What an audit counted, and what it found wrong."""

    runs: int = 0
    computed: int = 0
    repeated: int = 0
    arrived_twice: int = 0
    oldest_knowledge: float = 0.0
    problems: list[str] = field(default_factory=list)

    def demand(self, holds: bool, problem: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(problem)


def audit(world: World, round_: PoCRound) -> Findings:
    """Check everything about a round that is over or suspended; an AssertionError tells all that is wrong."""
    findings, slots = Findings(), slots_of(round_)
    arrivals = world.receiver.arrivals[round_.spec.block_hash]
    findings.arrived_twice = sum(count - 1 for count in arrivals.values())
    strangers = [nonce for nonce in arrivals if nonce % round_.status.slots not in slots]
    findings.demand(not strangers, f"nonces of no slot arrived: {strangers[:5]}")
    found = world.receiver.chain_lengths[round_.spec.block_hash]
    findings.demand(found == {chain_length(round_)}, f"results of {sorted(found)} indices arrived (0: vectors)")
    _check_totals(round_, len(arrivals), findings)
    gaps, outages, gateway = world.operator.gaps, world.api_server.outages, world.gateway
    histories = runs_of(round_, world.kubelet.sessions)
    for slot, (offset, partition) in zip(round_.status.assignments, slots.items(), strict=True):
        before = len(findings.problems)
        arrived = {partition.index(nonce) for nonce in arrivals if nonce % round_.status.slots == offset}
        _check_arrivals(slot, arrived, findings)
        known = Known(round_.id, (slot.node, slot.group), blind_times(gaps, outages), gateway is not None)
        _check_runs(f"slot {offset}", known, histories[offset], findings)
        if len(findings.problems) > before:
            since = world.kubelet.sessions[0].born
            findings.problems.append(timeline(histories[offset], since))
            findings.problems += [f"no operator {_span(gap, since)}" for gap in gaps]
            findings.problems += [f"no API server {_span(outage, since)}" for outage in outages]
    assert not findings.problems, "\n".join([f"{round_.metadata.name}:", *findings.problems])
    return findings


def _span(interval: Interval, since: float) -> str:
    return f"from {interval[0] - since:.1f} to {interval[1] - since:.1f} s"


def _check_totals(round_: PoCRound, arrived: int, findings: Findings) -> None:
    totals, slots = round_.status.totals, round_.status.assignments
    told = (totals.delivered, totals.valid, totals.checked, totals.rejected)
    findings.demand(told == (arrived, arrived, arrived, 0), f"totals are {totals}, but {arrived} nonces arrived")
    findings.demand(totals.retries == sum(slot.attempts - 1 for slot in slots), "retries are not the slots'")


def _check_arrivals(slot: Assignment, arrived: set[int], findings: Findings) -> None:
    missing, beyond = set(range(slot.delivered)) - arrived, arrived - set(range(slot.delivered))
    findings.demand(not missing, f"{len(missing)} nonces are lost, the first at {min(missing, default=0)}")
    findings.demand(not beyond, f"index {max(beyond, default=0)} arrived, but delivered is {slot.delivered}")


def _check_runs(name: str, known: Known, runs: Sequence[Run], findings: Findings) -> None:
    findings.runs += len(runs)
    findings.computed += sum(run.end - run.start for run in runs)
    findings.demand(runs[0].start == 0, f"{name} begins at {runs[0].start}")
    furthest = 0
    for before, after in pairwise(runs):
        # A gateway may store what a pod sent last only after the next one was told where to begin.
        furthest = max(furthest, before.end)
        pods = f"{before.session.pod} and {after.session.pod}"
        findings.demand(after.began >= before.ended, f"{name}: {pods} compute it at once")
        findings.demand(after.start <= furthest, f"{name}: {furthest} to {after.start} is left out")
        findings.repeated += furthest - after.start
        age = known.age(before, after)
        findings.oldest_knowledge = max(findings.oldest_knowledge, age)
        why = f"{name}: begins again at {after.start} of {before.end}, known {age:.1f} s before the loss"
        findings.demand(age <= KNOWLEDGE_SECONDS, why)


def check_orphans(world: World, since: float) -> None:
    """Check that no pod has begun a batch after a time at which no round wanted work any more."""
    orphans = [
        f"{session.pod} computes {work.nonces[0]} of block {work.block_hash} {work.began - since:.1f} s later"
        for session in world.kubelet.sessions
        for work in session.work[-1:]
        if work.began > since
    ]
    assert not orphans, "\n".join(orphans)


def blind_times(gaps: Sequence[Interval], outages: Sequence[Interval]) -> list[Interval]:
    """Return when nothing was recorded for good: the operator or the API server was away.

    What an operator held back when it was killed is lost with it, and after an outage that it did not survive also
    what it held back when that began.
    """
    held = [(begin - COUNTERS_SECONDS, end) for begin, end in gaps]
    for begin, end in outages:
        survived = not any(gap_begin < end and begin < gap_end for gap_begin, gap_end in gaps)
        held.append((begin if survived else begin - COUNTERS_SECONDS, end))
    return merged(held)


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
