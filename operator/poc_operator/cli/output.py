# SPDX-License-Identifier: Apache-2.0
"""What people and programs get to see: tables, bars, ages, and the same as JSON or YAML."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

import yaml
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

LookT = TypeVar("LookT")

#: Cells of a bar, and of one where there is little room.
BAR_CELLS, SHORT_BAR_CELLS = 20, 8
_EIGHTHS = " ▏▎▍▌▋▊▉"
_STEPS = ((timedelta(days=2), "d", 86_400), (timedelta(hours=2), "h", 3600), (timedelta(minutes=2), "min", 60))
NONE = "–"  # noqa: RUF001 - the sign for nothing
#: Columns of texts, which go on below. They get so many cells before other columns stay.
_TEXTS, _TEXT_CELLS = frozenset({"MESSAGE", "MODEL", "STATE", "DEGRADED", "FINDING"}), 24
#: Cells between columns, and where there is little room.
_GAP, _SHORT_GAP = 3, 2
#: Cells of a line in a pipe: more than any table needs, so that nothing is cut.
_PIPE_CELLS = 100_000

#: What stands in a table: a text, or one and a shorter one for where there is little room.
Cell = str | tuple[str, str]


class Format(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def show(data: Any, format_: Format) -> None:  # noqa: ANN401 - anything that JSON has
    """Write data for programs to standard output."""
    if format_ is Format.JSON:
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def console(*, error: bool = False) -> Console:
    """Return where people read: as wide as the terminal, or as wide as needed in a pipe, without colours there."""
    found = Console(stderr=error, highlight=False, soft_wrap=False)
    if not found.is_terminal:
        found.width = _PIPE_CELLS
    return found


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and a ``short`` one for where there is little room.

    Where there is not enough, columns with a ``rank`` go, that of the highest first. Without one they stay.
    """

    head: str
    short: str = ""
    rank: int = 0


def table(title: str, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> "Fitted":
    """Return a table in kubectl's manner: capital headings, no lines."""
    return Fitted(title, columns, list(rows))


class Fitted:
    """A table that is short where the terminal is narrow, and leaves columns out. In a pipe it has everything."""

    def __init__(self, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        self._title, self._columns, self._rows = title, columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the first of the ways to show it that the width has room for, else the narrowest."""
        every = range(len(self._columns))
        if self._least(every, short=False) <= options.max_width:
            yield self._made(every, short=False)
            return
        kept, leaving = list(every), self._leaving()
        while leaving and self._least(kept, short=True) > options.max_width:
            kept.remove(leaving.pop(0))
        yield self._made(kept, short=True, fold=self._least(kept, short=True) > options.max_width)

    def _leaving(self) -> list[int]:
        """Return the columns that may go, in that order: those that say nothing go before all others."""
        ranked = [place for place, column in enumerate(self._columns) if column.rank]
        return sorted(ranked, key=lambda place: (not self._is_empty(place), -self._columns[place].rank))

    def _is_empty(self, place: int) -> bool:
        return all(_cell(row[place], short=False) in {"", NONE} for row in self._rows)

    def _least(self, places: Sequence[int], *, short: bool) -> int:
        """Return the cells that these columns need."""
        gaps = (_SHORT_GAP if short else _GAP) * (len(places) - 1)
        return gaps + sum(self._least_of(place, short=short) for place in places)

    def _least_of(self, place: int, *, short: bool) -> int:
        column = self._columns[place]
        longest = max((cell_len(_cell(row[place], short=short)) for row in self._rows), default=0)
        needed = min(longest, _TEXT_CELLS) if column.head in _TEXTS else longest
        return max(needed, cell_len(_head(column, short=short)))

    def _made(self, places: Sequence[int], *, short: bool, fold: bool = False) -> Table:
        """Return the table of these columns; with ``fold``, names go on below too, rather than lose their ends."""
        gap = (0, _SHORT_GAP if short else _GAP, 0, 0)
        made = Table(title=self._title, title_justify="left", box=None, pad_edge=False, padding=gap)
        made.title_style = "bold"
        for column in (self._columns[place] for place in places):
            wraps = fold or column.head in _TEXTS
            made.add_column(_head(column, short=short), overflow="fold", no_wrap=not wraps)
        for row in self._rows:
            made.add_row(*(Text(_cell(row[place], short=short)) for place in places))
        return made


def _head(column: Column, *, short: bool) -> str:
    return column.short if short and column.short else column.head


def _cell(cell: Cell, *, short: bool) -> str:
    return cell if isinstance(cell, str) else cell[short]


def follow(looks: Iterable[LookT], render: Callable[[LookT], RenderableType]) -> LookT | None:
    """Show one look after the other: in place in a terminal, one below the other elsewhere. Return the last.

    In place only so many rows are shown as the terminal has; what stays at the end is the last look in full.
    """
    where, last = console(), None
    if not where.is_terminal:
        for last in looks:
            where.print(render(last))
        return last
    with Live(console=where, auto_refresh=False) as live:
        try:
            for last in looks:
                live.update(Cropped(render(last)), refresh=True)
        finally:
            if last is not None:
                live.update(render(last))
    return last


@dataclass(frozen=True)
class Cropped:
    """As many rows as the terminal has, and how many more there are."""

    whole: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the rows, of which the last says what is left out."""
        lines, room = console.render_lines(self.whole, options, pad=False), options.size.height
        shown = lines if len(lines) <= room else lines[: room - 1]
        for place, line in enumerate(shown):
            if place:
                yield Segment.line()
            yield from line
        if len(shown) < len(lines):
            yield Segment.line()
            yield Text(f"… and {len(lines) - len(shown)} more rows below", no_wrap=True, end="")


def bar(share: float | None, cells: int = BAR_CELLS) -> str:
    """Return a bar of so many cells, and the percent; nothing if the share is not known."""
    if share is None:
        return ""
    filled = max(0.0, min(1.0, share)) * cells
    whole = int(filled)
    part = _EIGHTHS[int((filled - whole) * 8)] if whole < cells else ""
    return f"{'█' * whole}{part}".ljust(cells, "░").replace(" ", "░") + f" {100 * min(1.0, max(0.0, share)):3.0f} %"


def period(span: timedelta | None) -> str:
    """Return a span of time as kubectl shows an age: in one unit, rounded down."""
    if span is None:
        return NONE
    for least, unit, seconds in _STEPS:
        if span >= least:
            return f"{int(span.total_seconds() // seconds)} {unit}"
    return f"{max(0, int(span.total_seconds()))} s"


def age(since: datetime | None, now: datetime) -> str:
    """Return how long ago something was."""
    return period(now - since) if since is not None else NONE


def number(value: float) -> str:
    """Return a number whose thousands are told apart by a space."""
    text = f"{value:,.1f}" if isinstance(value, float) and value != int(value) else f"{int(value):,}"
    return text.replace(",", " ")
