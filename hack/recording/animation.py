# SPDX-License-Identifier: Apache-2.0
"""A recording of a terminal as an SVG that plays itself, in CSS alone.

pyte is the terminal. Each screen is a picture of a film that moves behind a window. Equal rows are drawn once, and used
by all screens that have them: so the film is small. Browsers play it again and again, in the reader's light or dark
scheme. Who wants less motion sees the last screen, as does a program that knows no CSS.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any
from xml.sax.saxutils import escape

import pyte

from hack.recording.cast import Cast
from hack.toolchain.common import UserError

MOST_BYTES = 300 * 1024
#: Every screen lasts so many seconds or more, what comes sooner is of the next; the last one stays for so long.
SHORTEST, LAST_SECONDS = 0.1, 6.0
#: Pixels of a cell, around the screen, of letters, and from the top of a cell to their line. A cell is as high as a
#: full block of most fonts, so that columns of blocks join.
CELL_WIDTH, CELL_HEIGHT, MARGIN, LETTERS, _BASE = 8.4, 16, 14, 14, 13
_WORDS = re.compile(r"\S+(?: \S+)*")
_FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
#: Colours of text in the light and the dark scheme, each with a contrast of 4.5 or more to its ground.
_COLOURS = {
    "ground": ("#f6f8fa", "#0d1117"),
    "text": ("#1f2328", "#e6edf3"),
    "black": ("#1f2328", "#8b949e"),
    "red": ("#b31d28", "#ff7b72"),
    "green": ("#116329", "#7ee787"),
    "brown": ("#7d4e00", "#e3b341"),
    "blue": ("#0550ae", "#79c0ff"),
    "magenta": ("#8250df", "#d2a8ff"),
    "cyan": ("#0b5d68", "#56d4dd"),
    "white": ("#57606a", "#e6edf3"),
}

#: A row as runs of equal style: column, text, colour, whether it is bold.
Row = tuple["Run", ...]


@dataclass(frozen=True)
class Run:
    """A few words of a row in one style."""

    column: int
    text: str
    colour: str
    bold: bool


@dataclass(frozen=True)
class Screen:
    """What a terminal shows from a second on."""

    at: float
    rows: tuple[Row, ...]


def screens(cast: Cast) -> list[Screen]:
    """Return the screens of a recording that differ from the one before, ten in a second at most."""
    terminal = pyte.Screen(cast.columns, cast.rows)
    stream = pyte.Stream(terminal)
    found: list[Screen] = []
    moments = [int(at / SHORTEST) for at, _ in cast.events]
    for (_, text), (moment, following) in zip(cast.events, pairwise([*moments, -1]), strict=True):
        stream.feed(text)
        if moment == following:
            continue
        rows = tuple(_row(terminal.buffer[line], cast.columns) for line in range(cast.rows))
        if not found or rows != found[-1].rows:
            found.append(Screen(moment * SHORTEST, rows))
    return found


def _row(cells: Mapping[int, Any], columns: int) -> Row:
    return tuple(_runs(cells, columns))


def _runs(cells: Mapping[int, Any], columns: int) -> Iterator[Run]:
    def style(column: int) -> tuple[str, bool]:
        name = cells[column].fg.removeprefix("bright")
        return (name if name in _COLOURS else "text"), bool(cells[column].bold)

    for (colour, bold), same in groupby(range(columns), style):
        places = list(same)
        text = "".join(cells[column].data for column in places)
        # Each group of words has a column of its own: no font moves what stands below each other.
        for words in _WORDS.finditer(text):
            yield Run(places[0] + words.start(), words.group(), colour, bold)


def draw(cast: Cast) -> str:
    """Return the SVG of a recording. UserError if it is empty, or has too many bytes for a page."""
    film = screens(cast)
    if not film:
        raise UserError("The recording is empty: record it again.")
    width, height = _width(cast), cast.rows * CELL_HEIGHT
    outer = (width + 2 * MARGIN, height + 2 * MARGIN)
    names = _names(film)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {outer[0]} {outer[1]}" width="{outer[0]}" '
        f'height="{outer[1]}" role="img" aria-labelledby="t">',
        f'<title id="t">{escape(cast.title)}</title>',
        f"<style>{_style(film, cast.seconds + LAST_SECONDS, _pitch(cast))}</style>",
        f"<defs>{''.join(_drawn(row, name) for row, name in names.items())}</defs>",
        f'<rect class="ground" width="{outer[0]}" height="{outer[1]}" rx="8"/>',
        f'<svg x="{MARGIN}" y="{MARGIN}" width="{width}" height="{height}"><g class="film">',
        *(_placed(screen, place * _pitch(cast), names) for place, screen in enumerate(film)),
        "</g></svg></svg>",
    ]
    drawn = "".join(parts) + "\n"
    if len(drawn.encode()) > MOST_BYTES:
        raise UserError(f"The picture has {len(drawn.encode())} bytes, more than {MOST_BYTES}: record less.")
    return drawn


def _names(film: list[Screen]) -> dict[Row, str]:
    rows = dict.fromkeys(row for screen in film for row in screen.rows if row)
    return {row: f"r{number}" for number, row in enumerate(rows)}


def _width(cast: Cast) -> int:
    return round(cast.columns * CELL_WIDTH)


def _pitch(cast: Cast) -> int:
    # Apart, so that nothing of the next screen shows at the edge of this one.
    return _width(cast) + MARGIN


def _style(film: list[Screen], seconds: float, pitch: int) -> str:
    last = f"transform:translateX(-{(len(film) - 1) * pitch}px)"
    steps = "".join(
        f"{100 * screen.at / seconds:.2f}%{{transform:translateX(-{place * pitch}px)}}"
        for place, screen in enumerate(film)
        if place
    )
    return (
        f"text{{font:{LETTERS}px {_FONTS};white-space:pre}}.b{{font-weight:700}}"
        f"{_scheme(0)}@media (prefers-color-scheme:dark){{{_scheme(1)}}}"
        f".film{{{last}}}"
        f"@media (prefers-reduced-motion:no-preference){{.film{{animation:play {seconds:.2f}s step-end infinite}}}}"
        f"@keyframes play{{0%{{transform:none}}{steps}100%{{{last}}}}}"
    )


def _scheme(which: int) -> str:
    colours = "".join(f".{name}{{fill:{pair[which]}}}" for name, pair in _COLOURS.items() if name != "text")
    return f"text{{fill:{_COLOURS['text'][which]}}}{colours}"


def _drawn(row: Row, name: str) -> str:
    return f'<g id="{name}">{"".join(map(_text, row))}</g>'


def _text(run: Run) -> str:
    # The length is given, since fonts differ in how wide a cell is; then blocks join without a gap.
    wide = round(len(run.text) * CELL_WIDTH, 1)
    names = [run.colour] * (run.colour != "text") + ["b"] * run.bold
    style = f' class="{" ".join(names)}"' if names else ""
    place = f'x="{round(run.column * CELL_WIDTH, 1):g}" y="{_BASE}" textLength="{wide:g}"'
    return f'<text{style} {place} lengthAdjust="spacingAndGlyphs">{escape(run.text)}</text>'


def _placed(screen: Screen, left: int, names: Mapping[Row, str]) -> str:
    used = "".join(
        f'<use href="#{names[row]}" y="{line * CELL_HEIGHT}"/>' for line, row in enumerate(screen.rows) if row
    )
    return f'<g transform="translate({left})">{used}</g>'
