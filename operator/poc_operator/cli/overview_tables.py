# SPDX-License-Identifier: Apache-2.0
"""The overview as tables for people."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from poc_operator.apis.v1alpha1.status import State
from poc_operator.cli import output
from poc_operator.cli.output import NONE, bar, number, period
from poc_operator.cli.overview import MOST_SLOTS, FleetRow, Overview, PodRow, RoundRow, SlotRow

#: Rounds that are over and shown all the same.
MOST_OVER = 10

_FLEETS = ("NAME", "MODEL", "READY", "UP-TO-DATE", "UPDATE", "STATUS", "AGE", "MESSAGE")
_ROUNDS = ("NAME", "STATE", "SLOTS", "PROGRESS", "CHECKED", "VALID", "RATE", "HELD BY CHAT", "ETA", "AGE", "DEGRADED")
_SLOTS = ("SLOT", "POD", "STATE", "DELIVERED, OF THE FASTEST", "DELIVERED", "BACKLOG", "RATE", "HELD BY CHAT")
_PODS = ("NAME", "FLEET", "STAGE", "SELF-CHECK", "COMPUTES", "KUBERNETES NODE", "AGE")


def tables(found: Overview, *, everywhere: bool) -> RenderableType:
    """Return the tables; names have their namespaces in front if objects are of all of them."""
    parts: list[RenderableType] = []
    if found.fleets:
        parts.append(output.table("Fleets", _FLEETS, [_fleet(row, everywhere=everywhere) for row in found.fleets]))
    if found.rounds:
        shown = recent(found.rounds)
        parts.append(output.table("Rounds", _ROUNDS, [_round(row, everywhere=everywhere) for row in shown]))
        if len(shown) < len(found.rounds):
            parts.append(Text(f"… and {len(found.rounds) - len(shown)} older ones that are over: see all with -o json"))
        parts += [part for row in shown for part in slots(row)]
    if found.pods:
        parts.append(output.table("Pods", _PODS, [_pod(row, everywhere=everywhere) for row in found.pods]))
    if not parts:
        return Text("No fleets, rounds or pods here: look with -A, or begin with the quick start.")
    parts += [Text(f"note: {note}") for note in found.notes]
    return Group(*_spaced(parts))


def recent(rows: Sequence[RoundRow]) -> list[RoundRow]:
    """Return the rounds that are not over, and the newest of the others, in their order."""
    over = [row for row in rows if row.state in (State.COMPLETE, State.FAILED)]
    left_out = {(row.namespace, row.name) for row in over[MOST_OVER:]}
    return [row for row in rows if (row.namespace, row.name) not in left_out]


def _spaced(parts: Iterable[RenderableType]) -> Iterable[RenderableType]:
    for place, part in enumerate(parts):
        if place:
            yield Text("")
        yield part


def slots(row: RoundRow) -> list[RenderableType]:
    """Return the table of a round's slots; nothing if no pod works on it."""
    if row.state in (State.COMPLETE, State.FAILED) or not row.slots:
        return []
    shown = row.slots[:MOST_SLOTS]
    made: list[RenderableType] = [_slot_table(f"Slots of {row.name}", shown)]
    if len(shown) < len(row.slots):
        made.append(Text(f"… and {len(row.slots) - len(shown)} more: see all with -o json"))
    return made


def _slot_table(title: str, rows: Iterable[SlotRow]) -> Table:
    return output.table(title, _SLOTS, [_slot(row) for row in rows])


def _slot(row: SlotRow) -> list[str]:
    return [
        f"{row.node}/{row.group}",
        row.pod or NONE,
        row.state,
        bar(row.share),
        number(row.delivered),
        number(row.backlog),
        f"{row.rate:.1f}/s" if row.rate is not None else NONE,
        _held(row),
    ]


def _held(row: SlotRow) -> str:
    if row.held_by_chat is None:
        return NONE
    now = "now" if row.held_by_chat else "no"
    if row.held_share is not None:
        return f"{now}, {100 * row.held_share:.0f} % of the time"
    return f"{now}, {period(timedelta(seconds=row.held_seconds or 0))} in all"


def _round(row: RoundRow, *, everywhere: bool) -> list[str]:
    chat = f"{row.held_by_chat} of {row.running} pods" if row.held_by_chat is not None else NONE
    return [
        _name(row.namespace, row.name, everywhere=everywhere),
        row.state,
        f"{row.running}/{row.desired}",
        bar(row.share) or row.goal,
        number(row.checked),
        number(row.valid),
        f"{row.rate:.1f}/s",
        chat,
        period(timedelta(seconds=row.eta_seconds)) if row.eta_seconds is not None else NONE,
        period(timedelta(seconds=row.age_seconds)),
        row.degraded or NONE,
    ]


def _fleet(row: FleetRow, *, everywhere: bool) -> list[str]:
    return [
        _name(row.namespace, row.name, everywhere=everywhere),
        row.model,
        row.ready,
        str(row.updated),
        row.update,
        row.reason,
        period(timedelta(seconds=row.age_seconds)),
        row.message,
    ]


def _pod(row: PodRow, *, everywhere: bool) -> list[str]:
    return [
        _name(row.namespace, row.name, everywhere=everywhere),
        row.fleet or NONE,
        row.stage,
        row.self_check or NONE,
        row.round or NONE,
        row.node or NONE,
        period(timedelta(seconds=row.age_seconds)) if row.age_seconds is not None else NONE,
    ]


def _name(namespace: str, name: str, *, everywhere: bool) -> str:
    return f"{namespace}/{name}" if everywhere else name
