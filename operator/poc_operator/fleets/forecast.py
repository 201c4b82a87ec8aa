# SPDX-License-Identifier: Apache-2.0
"""What keeps the pods of a fleet from being replaced: work that goes on, and rounds that are to be expected. Pure.

A round is never lost by an update, since a pod leaves only when three things hold:

1. **Nothing runs.** No PoCRound, PoCValidation or PoCCalibration that selects the fleet's pods is under way. One that
   is suspended has no pods, and holds up nothing. One that none of the old pods can do needs the update: it waits for
   the new pods.
2. **The network does not validate.** After a round that the gateway made for the network, validators ask the same pods
   for named nonces. They have `VALIDATION_SECONDS` for it.
3. **No round is near.** A pod needs some time to be replaced: as long as the fleet's own pods took to become ready,
   half as much again, and the time that the old one may take to end. Until a pod has been seen to become ready, that is
   the time that it may load.

The next round is forecast from the times between the starts of earlier ones. Rounds that overlap count as one. If ``G``
is such a time, a round may start from ``G`` after the last start on, and for another quarter of ``G`` if it is late.
A pod that could not be back before ``G`` is not replaced, and none is while the round may be late::

    last start           over               G - need          G          1.25 G
        |--- round runs ---|--- pods may go ----|--- a round is near ------|--- pods may go …

With several different times each of them has its span. So rounds every minute leave the pause between two of them, the
network's daily round leaves most of the day, and one odd short pause holds up an update only briefly. Without two
starts nothing is forecast. A round that nobody could foresee waits for the slot of the pod that is away.

The heights of blocks tell the network's rounds apart. Regular ones are an epoch of `EPOCH_BLOCKS` apart, or several.
Those that confirm, and segments of challenges, come at any height, and nothing follows from them. Once two regular
rounds are known, ``G`` is the time of an epoch for the network's rounds, counted from the last regular one. A single
round of the network may be regular, so another is expected an epoch later, by blocks of about `BLOCK_SECONDS`. Test
networks have shorter epochs, which show by rounds at several places of one: then the times between starts count.

What waits for the update cannot wait for the round after it. So while a round of users waits, only those of the network
are forecast. While one of the network waits, only regular ones are, of which it may be the newest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto
from itertools import pairwise
from typing import Any, Self

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.fleet_update import MAX_ROUNDS, FleetRound
from poc_operator.apis.v1alpha1.meta import FLEET_LABEL, NETWORK_ORIGIN, ORIGIN_LABEL
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.apis.v1alpha1.status import is_over
from poc_operator.observed import PodView
from poc_operator.planning.reaping import WorkRecord

#: Seconds after a round of the network in which validators may ask its pods: 240 blocks of about 5.2 s, rounded up.
VALIDATION_SECONDS = 1300
#: Blocks of an epoch of the network, and seconds from one to the next: at least, and at most.
EPOCH_BLOCKS = 17_280
BLOCK_SECONDS = (5.0, 5.4)
#: A round counts as late until so many times the time since the last start.
_LATE = 1.25
#: So many epochs after the last round of the network none is expected any more: the fleet is not the network's now.
_MISSED = 7
#: A pod may take so many times as long to become ready as those before.
_SLOWER = 1.5
#: So many objects are named in a message.
_NAMED = 3


class Spares(Enum):
    """What an eviction must not take a pod from: looked at once more before it is done."""

    NOTHING = auto()
    SLOTS = auto()  # a round that has given the pod a slot
    WORK = auto()  # any work that selects the fleet's pods, and that they can do


@dataclass(frozen=True)
class Eviction:
    """A pod to evict. ``revision`` is what an update wants in its place; it is empty if no update evicts it."""

    pod: PodView
    spares: Spares
    revision: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkOnPods:
    """An object that asks pods to work. ``over`` is when it was finished; ``live`` says that pods may work for it.

    ``started`` says whether a pod has begun it. ``unfit`` are the revisions of pods that cannot do it, ``height`` is
    that of its block.
    """

    record: WorkRecord
    kind: str
    created: datetime
    live: bool
    started: bool = False
    over: datetime | None = None
    network: bool = False
    unfit: frozenset[str] = frozenset()
    height: int | None = None

    @classmethod
    def parse(cls, kind: str, body: Mapping[str, Any]) -> Self:
        """Read an object of this kind, as the API server has it."""
        metadata, status = body["metadata"], body.get("status") or {}
        completed, height = status.get("completionTime"), (body.get("spec") or {}).get("blockHeight")
        return cls(
            record=WorkRecord.parse(body),
            kind=kind,
            created=datetime.fromisoformat(metadata["creationTimestamp"]),
            live=not is_over(status),
            started=bool(status.get("startTime") or status.get("workedSeconds")),
            over=datetime.fromisoformat(completed) if completed else None,
            network=(metadata.get("labels") or {}).get(ORIGIN_LABEL) == NETWORK_ORIGIN,
            unfit=frozenset(map(str, status.get("unfitRevisions") or ())),
            height=height if isinstance(height, int) else None,
        )

    def needs(self, pod: PodView) -> bool:
        """Whether it is under way, and may lose something with the pod: its slot, or one that can do the work."""
        return self.live and (pod.uid in self.record.holders or pod.revision not in self.unfit)

    def concerns(self, fleet: PoCFleet, labels: Iterable[Mapping[str, str]]) -> bool:
        """Whether it selects pods of the fleet, which have these sets of labels."""
        if self.record.namespace != fleet.metadata.namespace:
            return False
        selector = self.record.selector
        name = (selector.match_labels or {}).get(FLEET_LABEL, fleet.metadata.name)
        return name == fleet.metadata.name and any(map(selector.matches, labels))

    def __str__(self) -> str:
        return f"{self.kind} {self.record.name}"


def remembered(known: Sequence[FleetRound], work: Iterable[WorkOnPods], now: datetime) -> list[FleetRound]:
    """Return the fleet's last rounds, by their start: those that were known, and those that there are now.

    One that is gone is over, and so is one that was finished or suspended. What is over and was never begun, as a
    mistyped round, tells nothing of those to come. A round of the network does, even if the fleet missed it. Rounds of
    users push out none of the last ones of the network, nor these them.
    """
    before = {one.uid: one for one in known}
    rounds = {one.record.uid: one for one in work if one.kind == PoCRound.KIND.kind}
    found = {uid: one if one.over_time else one.model_copy(update={"over_time": now}) for uid, one in before.items()}
    for uid, one in rounds.items():
        earlier = before[uid].over_time if uid in before else None
        found[uid] = FleetRound(
            started=one.started or (uid in before and _was_begun(before[uid])),
            uid=uid,
            name=one.record.name,
            start_time=one.created,
            over_time=None if one.live else one.over or earlier or now,
            network=one.network,
            height=one.height,
        )
    told = [one for one in found.values() if one.started or one.network or one.over_time is None]
    told.sort(key=lambda one: (one.start_time, one.uid))
    network, others = ([one for one in told if one.network is is_network] for is_network in (True, False))
    half = MAX_ROUNDS // 2
    kept = network[min(half, len(others)) - MAX_ROUNDS :] + others[min(half, len(network)) - MAX_ROUNDS :]
    return sorted(kept, key=lambda one: (one.start_time, one.uid))


def _was_begun(known: FleetRound) -> bool:
    """Whether the status says that a pod has begun it. Older operators wrote nothing, and the object itself tells."""
    return known.started and "started" in known.model_fields_set


def startup_seconds(pods: Sequence[PodView], known: int, limit: int) -> int:
    """Return how long a pod takes from its creation until it is ready: the median of these pods, ``known`` without any.

    Pods that have restarted since tell nothing. Nor do those that became ready more than ``limit`` after their
    containers ran, which is how long a pod may take: they are ready once more, as after a probe that timed out.
    """
    times = sorted(
        math.ceil((pod.ready_since - pod.created).total_seconds())
        for pod in pods
        if pod.ready_since
        and pod.created
        and not any(container.restarts for container in pod.containers)
        and pod.ready_since - _begun(pod, pod.created) <= timedelta(seconds=limit)
    )
    return max(times[len(times) // 2], 1) if times else known


def _begun(pod: PodView, created: datetime) -> datetime:
    return max((found.running_since for found in pod.containers if found.running_since), default=created)


def replacement_seconds(startup: int, *, limit: int, grace: int) -> int:
    """Return how long a pod is away at most when it is replaced.

    ``startup`` is what `startup_seconds` found, ``limit`` how long a pod may take, ``grace`` how long its end may take.
    """
    return grace + (min(math.ceil(startup * _SLOWER), max(limit, startup)) if startup else limit)


def validated_until(rounds: Iterable[FleetRound]) -> tuple[datetime, str] | None:
    """Return until when the network may validate a round that is over, and the round's name; None without any.

    A round that no pod has begun has no results to validate.
    """
    seconds = timedelta(seconds=VALIDATION_SECONDS)
    ends = [(one.over_time + seconds, one.name) for one in rounds if one.network and one.started and one.over_time]
    return max(ends, default=None)


def next_round(
    rounds: Sequence[FleetRound], now: datetime, need: int, waiting: Sequence[WorkOnPods] = ()
) -> datetime | None:
    """Return from when on a round may start that a pod would miss if it left now; None if none is expected.

    ``need`` is for how many seconds the pod would be away. ``waiting`` is the work that waits for the pod to leave.
    """
    regular = _regular(rounds)
    if regular:
        expected = _next_regular(regular, now, need)
        if expected is not None:
            return expected
    starts = _starts([one for one in _not_after(waiting, rounds) if not (regular and one.network)])
    if not starts:
        return None
    passed = now - starts[-1]
    gaps = sorted(after - before for before, after in pairwise(starts))
    near = (gap for gap in gaps if passed + timedelta(seconds=need) > gap and passed <= gap * _LATE)
    gap = next(near, None)
    return starts[-1] + gap if gap is not None else None


def _not_after(waiting: Sequence[WorkOnPods], rounds: Sequence[FleetRound]) -> Sequence[FleetRound]:
    """Return the rounds whose like need not wait until this work is done."""
    if any(one.network and one.kind == PoCRound.KIND.kind for one in waiting):
        return []
    return [one for one in rounds if one.network] if waiting else rounds


def _regular(rounds: Iterable[FleetRound]) -> Sequence[tuple[int, datetime]]:
    """Return heights and starts of the network's regular rounds, the lowest first; none if it is not clear.

    A single round of the network is taken for one.
    """
    starts: dict[int, datetime] = {}
    for one in rounds:
        if one.network and one.height is not None:
            starts[one.height] = min(one.start_time, starts.get(one.height, one.start_time))
    by_place: dict[int, list[tuple[int, datetime]]] = {}
    for height, start in sorted(starts.items()):
        by_place.setdefault(height % EPOCH_BLOCKS, []).append((height, start))
    several = [place for place in by_place.values() if len(place) > 1 or len(starts) == 1]
    if len(several) != 1:
        return []
    in_order = all(before[1] < after[1] for before, after in pairwise(several[0]))
    return several[0] if in_order else []


def _next_regular(regular: Sequence[tuple[int, datetime]], now: datetime, need: int) -> datetime | None:
    """Return from when on a regular round may start that a pod would miss if it left now."""
    epochs = [(after[1] - before[1]) * EPOCH_BLOCKS / (after[0] - before[0]) for before, after in pairwise(regular)]
    most = _MISSED if epochs else 1
    epochs = epochs or [timedelta(seconds=EPOCH_BLOCKS * seconds) for seconds in BLOCK_SECONDS]
    fastest, slowest, passed = min(epochs), max(epochs), now - regular[-1][1]
    # One that has not come although it could be late no longer was missed: the one after it is next.
    number = max(1, math.ceil(passed / slowest - (_LATE - 1)))
    is_near = number <= most and passed + timedelta(seconds=need) > number * fastest
    return regular[-1][1] + number * fastest if is_near else None


def _starts(rounds: Sequence[FleetRound]) -> list[datetime]:
    """Return when the fleet began to work: rounds that overlap, or fall into a validation, count as one."""
    starts, busy_until = list[datetime](), None
    for one in sorted(rounds, key=lambda one: one.start_time):
        if busy_until is None or one.start_time > busy_until:
            starts.append(one.start_time)
        after = timedelta(seconds=VALIDATION_SECONDS if one.network else 0)
        # One that is not over has seen all that is to come.
        end = one.over_time + after if one.over_time else one.start_time
        busy_until = end if busy_until is None else max(busy_until, end)
    return starts


def blocker(
    rounds: Sequence[FleetRound], work: Sequence[WorkOnPods], pods: Sequence[PodView], now: datetime, need: int
) -> str | None:
    """Say what an update waits for; None if one of these pods may be replaced, which takes ``need`` seconds."""
    needed = sorted(str(one) for one in work if one.live and any(map(one.needs, pods)))
    if needed:
        more = f" and {len(needed) - _NAMED} more" if len(needed) > _NAMED else ""
        return f"the end of {', '.join(needed[:_NAMED])}{more}"
    validation = validated_until(rounds)
    if validation is not None and now < validation[0]:
        return f"the network, which may validate round {validation[1]} until {_clock(validation[0])}"
    # What is live and needs none of these pods waits for the update.
    expected = next_round(rounds, now, need, [one for one in work if one.live])
    if expected is not None:
        return f"a round, which is expected from {_clock(expected)} on, since a pod needs {need} s to be replaced"
    return None


def _clock(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
