# SPDX-License-Identifier: Apache-2.0
"""What people and programs get to see: tables, bars, ages, and the same as JSON or YAML."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

import yaml
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

LookT = TypeVar("LookT")

#: Cells of a bar.
BAR_CELLS = 20
_EIGHTHS = " ▏▎▍▌▋▊▉"
_STEPS = ((timedelta(days=2), "d", 86_400), (timedelta(hours=2), "h", 3600), (timedelta(minutes=2), "min", 60))
NONE = "–"  # noqa: RUF001 - the sign for nothing


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
        found.width = 200
    return found


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table in kubectl's manner: capital headings, no lines."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0), title_style="bold")
    for column in columns:
        long = column in {"MESSAGE", "MODEL", "DEGRADED", "FINDING", "REMEDY"}
        made.add_column(column, overflow="fold" if long else "ellipsis", no_wrap=not long)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def follow(looks: Iterable[LookT], render: Callable[[LookT], RenderableType]) -> LookT | None:
    """Show one look after the other: in place in a terminal, one below the other elsewhere. Return the last."""
    where, last = console(), None
    if not where.is_terminal:
        for last in looks:
            where.print(render(last))
        return last
    with Live(console=where, auto_refresh=False, vertical_overflow="crop") as live:
        for last in looks:
            live.update(render(last), refresh=True)
    return last


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
