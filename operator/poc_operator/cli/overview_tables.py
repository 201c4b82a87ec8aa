# SPDX-License-Identifier: Apache-2.0
"""The overview as tables for people."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.text import Text

from poc_operator.apis.v1alpha1.status import State
from poc_operator.cli import output
from poc_operator.cli.output import NONE, SHORT_BAR_CELLS, Cell, Column, Fitted, bar, number, period
from poc_operator.cli.overview import MOST_SLOTS, FleetRow, Overview, PodRow, RoundRow, SlotRow

#: Rounds that are over and shown all the same.
MOST_OVER = 10

_FLEETS = (
    Column("NAME"),
    Column("MODEL", rank=2),
    Column("READY"),
    Column("UP-TO-DATE", "NEW", rank=3),
    Column("UPDATE", rank=1),
    Column("STATUS"),
    Column("AGE", rank=4),
    Column("MESSAGE"),
)
_ROUNDS = (
    Column("NAME"),
    Column("STATE"),
    Column("SLOTS", rank=1),
    Column("PROGRESS"),
    Column("CHECKED", rank=5),
    Column("VALID", rank=4),
    Column("RATE"),
    Column("HELD BY CHAT", "CHAT", rank=2),
    Column("ETA"),
    Column("AGE", rank=3),
    Column("DEGRADED"),
)
_SLOTS = (
    Column("SLOT"),
    Column("POD"),
    Column("STATE"),
    Column("DELIVERED, OF THE FASTEST", "OF THE FASTEST", rank=1),
    Column("DELIVERED", rank=3),
    Column("BACKLOG", rank=4),
    Column("RATE"),
    Column("HELD BY CHAT", "CHAT", rank=2),
)
_PODS = (
    Column("NAME"),
    Column("FLEET", rank=1),
    Column("STAGE"),
    Column("SELF-CHECK", rank=3),
    Column("COMPUTES"),
    Column("KUBERNETES NODE", "K8S NODE", rank=2),
    Column("AGE", rank=4),
)


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


def _slot_table(title: str, rows: Iterable[SlotRow]) -> Fitted:
    return output.table(title, _SLOTS, [_slot(row) for row in rows])


def _slot(row: SlotRow) -> list[Cell]:
    return [
        f"{row.node}/{row.group}",
        row.pod or NONE,
        row.state,
        (bar(row.share), bar(row.share, SHORT_BAR_CELLS)),
        number(row.delivered),
        number(row.backlog),
        f"{row.rate:.1f}/s" if row.rate is not None else NONE,
        _held(row),
    ]


def _held(row: SlotRow) -> Cell:
    if row.held_by_chat is None:
        return NONE
    now = "now" if row.held_by_chat else "no"
    if row.held_share is not None:
        share = f"{now}, {100 * row.held_share:.0f} %"
        return f"{share} of the time", share
    span = f"{now}, {period(timedelta(seconds=row.held_seconds or 0))}"
    return f"{span} in all", span


def _round(row: RoundRow, *, everywhere: bool) -> list[Cell]:
    chat: Cell = NONE
    if row.held_by_chat is not None:
        chat = f"{row.held_by_chat} of {row.running} pods", f"{row.held_by_chat}/{row.running}"
    return [
        _name(row.namespace, row.name, everywhere=everywhere),
        f"{row.state}: {row.reason}" if row.reason else row.state,
        f"{row.running}/{row.desired}",
        _progress(row),
        number(row.checked),
        number(row.valid),
        f"{row.rate:.1f}/s",
        chat,
        period(timedelta(seconds=row.eta_seconds)) if row.eta_seconds is not None else NONE,
        period(timedelta(seconds=row.age_seconds)),
        row.degraded.replace(",", ", ") or NONE,  # so that a line ends between two reasons
    ]


def _progress(row: RoundRow) -> Cell:
    if row.share is None:
        return row.goal, "no goal"
    return bar(row.share), bar(row.share, SHORT_BAR_CELLS)


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


def _pod(row: PodRow, *, everywhere: bool) -> list[Cell]:
    return [
        _name(row.namespace, row.name, everywhere=everywhere),
        row.fleet or NONE,
        (f"{row.stage}: {row.loading}", f"{row.stage}: {row.loading.short}") if row.loading else row.stage,
        row.self_check or NONE,
        row.round or NONE,
        row.node or NONE,
        period(timedelta(seconds=row.age_seconds)) if row.age_seconds is not None else NONE,
    ]


def _name(namespace: str, name: str, *, everywhere: bool) -> str:
    return f"{namespace}/{name}" if everywhere else name
