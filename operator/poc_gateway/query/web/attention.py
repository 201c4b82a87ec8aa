# SPDX-License-Identifier: Apache-2.0
"""What needs a look, and what to do about it: conditions of objects, and results that conflict or did not arrive.

The texts about conditions are those of the API (``apis.v1alpha1.explanations``), so that page, plugin and reference
say the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from poc_gateway.query.web.seen import Stored, StoredRound
from poc_operator.apis.v1alpha1.conditions import Condition, ConditionType
from poc_operator.apis.v1alpha1.explanations import EXPLANATIONS
from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.apis.v1alpha1.round import PoCRound

#: Items that are told; a count tells of the others.
MOST_ITEMS = 50
_FLEET_WANTED = {
    ConditionType.ACCEPTED: "False",
    ConditionType.DEGRADED: "True",
    ConditionType.STALLED: "True",
    ConditionType.READY: "False",
}
_ROUND_WANTED = {
    ConditionType.ACCEPTED: "False",
    ConditionType.DEGRADED: "True",
    ConditionType.FAILED: "True",
    ConditionType.PROGRESSING: "False",
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing that needs a look. ``act`` if a person must do something, else it may pass by itself."""

    subject: str
    reason: str
    act: bool
    seen: str
    remedy: str
    command: str = ""

    def told(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


def items(
    fleets: Iterable[PoCFleet], rounds: Iterable[PoCRound], stored: Stored | None, *, disk_full: bool
) -> list[dict[str, Any]]:
    """Return what needs a look, what a person must do first; the last entry counts what is left out."""
    found = list(_of_gateway(stored, disk_full=disk_full))
    for fleet in fleets:
        found += _of_fleet(fleet)
    for round_ in rounds:
        found += _of_round(round_)
    for one in stored.rounds if stored is not None else ():
        found += _of_results(one)
    found.sort(key=lambda item: not item.act)
    told = [item.told() for item in found[:MOST_ITEMS]]
    if len(found) > MOST_ITEMS:
        rest = f"{len(found) - MOST_ITEMS} more are not shown."
        more = Item(subject="All", reason="More", act=False, seen=rest, remedy="", command="kubectl poc status -A")
        told.append(more.told())
    return told


def _of_fleet(fleet: PoCFleet) -> Iterator[Item]:
    meta = fleet.metadata
    command = f"kubectl poc -n {meta.namespace} explain fleet/{meta.name}"
    subject = f"Fleet {meta.namespace}/{meta.name}"
    told = set[str]()
    for condition in fleet.status.own_conditions.values():
        wanted = _FLEET_WANTED.get(condition.type) == condition.status
        if wanted and condition.reason not in told:
            told.add(condition.reason)
            yield _of_reason(subject, condition.reason, condition.message, command)


def _of_round(round_: PoCRound) -> Iterator[Item]:
    meta, status = round_.metadata, round_.status
    command, subject = f"kubectl poc -n {meta.namespace} explain {meta.name}", f"Round {meta.namespace}/{meta.name}"
    told = set[str]()
    for condition in status.own_conditions:
        waits = condition.type is ConditionType.PROGRESSING
        if _ROUND_WANTED.get(condition.type) != condition.status or (waits and status.state.finished):
            continue
        for reason in _reasons(condition, status.degraded):
            item = _of_reason(subject, reason, condition.message, command)
            # A round that waits or was suspended as somebody wished is no news.
            if reason not in told and (item.remedy or not waits):
                told.add(reason)
                yield item


def _reasons(condition: Condition, degraded: str) -> Sequence[str]:
    if condition.type is ConditionType.DEGRADED and degraded:
        return degraded.split(",")
    return [condition.reason]


def _of_reason(subject: str, reason: str, message: str, command: str) -> Item:
    try:
        known = EXPLANATIONS[Reason(reason)]
    except (ValueError, KeyError):
        remedy = "The gateway does not know this reason: bring it to the operator's version."
        return Item(subject=subject, reason=reason, act=True, seen=message, remedy=remedy, command=command)
    remedy = _plain(known.remedy or "")
    seen = message or _plain(known.meaning)
    return Item(subject=subject, reason=reason, act=bool(remedy), seen=seen, remedy=remedy, command=command)


def _plain(text: str) -> str:
    """Return a text of the reference without its marks for code."""
    return text.replace("`", "")


def _of_gateway(stored: Stored | None, *, disk_full: bool) -> Iterator[Item]:
    if disk_full:
        yield Item(
            subject="Gateway",
            reason="StorageFull",
            act=True,
            seen="The disk is full: nothing new is stored, and pods keep their results.",
            remedy="Enlarge the volume, or keep rounds for a shorter time (gateway.retention).",
            command="kubectl poc check",
        )
    for state, count in (stored.lost_callbacks if stored is not None else {}).items():
        yield Item(
            subject="Gateway",
            reason=f"Callbacks{state.title()}",
            act=state != "abandoned",
            seen=f"Verdicts and results of requests that ended as {state}: {count:,}.",
            remedy="Mend their receiver, then send them again.",
            command=f"GET /outbox?state={state}, then POST /outbox/ID/replay",
        )


def _of_results(found: StoredRound) -> Iterator[Item]:
    terms, sent = found.terms, found.sent
    subject = f"Round {terms.namespace}/{terms.name}"
    route, results = f"/rounds/{terms.namespace}/{terms.name}", f"kubectl poc -n {terms.namespace} round results"
    ended = (
        ("ResultsRefused", sent.dead, "The receiver refused {} for good: dead letters.", "refused"),
        ("ResultsExpired", sent.expired, "No receiver accepted {} in time.", "expired"),
    )
    for reason, count, seen, state in ended:
        if count:
            remedy = "Find out why from the receiver and the reasons in the ledger, then send them again."
            command = f"POST {route}/ledger/replay?state={state}"
            told = seen.format(_results(count))
            yield Item(subject=subject, reason=reason, act=True, seen=told, remedy=remedy, command=command)
    if sent.abandoned:
        seen = f"Given up: {_results(sent.abandoned)}, by somebody or since no pod computes the same."
        remedy = "Nothing, if that was meant. They are kept here, and can be exported or sent again."
        command = f"POST {route}/ledger/replay?state=abandoned"
        yield Item(subject=subject, reason="ResultsAbandoned", act=False, seen=seen, remedy=remedy, command=command)
    if found.undecided:
        seen = f"Pods differ in {_results(found.undecided)}, and nobody knows yet which pod is honest."
        remedy = "The operator lets a third pod compute them. If it has none, look at the pods that differ."
        command = f"{results} {terms.name}"
        yield Item(subject=subject, reason="ResultsUndecided", act=False, seen=seen, remedy=remedy, command=command)
    yield from _of_limits(found, subject)


def _results(count: int) -> str:
    return f"{count:,} result{'s' if count > 1 else ''}"


def _of_limits(found: StoredRound, subject: str) -> Iterator[Item]:
    if found.limit_reached is not None:
        seen = f"New results are refused: {found.limit_reached}."
        remedy = "Raise the limit (gateway.limits), or finish the round."
        yield Item(subject=subject, reason="RoundFull", act=True, seen=seen, remedy=remedy)
    if found.archive_error is not None:
        seen = f"The last try to archive it failed: {found.archive_error}."
        remedy = "Mend the bucket or its credentials. The gateway tries again by itself."
        yield Item(subject=subject, reason="ArchiveFailed", act=True, seen=seen, remedy=remedy)
