# SPDX-License-Identifier: Apache-2.0
"""Plots of what a gateway tells of a round's results, in a terminal and as a PNG: rate over time, and a histogram.

pygal draws the plots and resvg makes a PNG of them, with a font that the plugin brings: machines without a screen have
none. Together they are one small wheel each for all releases of Python, while Krew's archives would need matplotlib or
Pillow four times.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from textwrap import shorten
from typing import Any

from poc_operator.cli.cluster import UserError
from poc_operator.cli.output import number

_BAR = 40
#: Cells of the plot of rates: so many high, and at most so many wide.
_ROWS, _CELLS = 6, 60
_EIGHTHS = " ▁▂▃▄▅▆▇█"
#: Pixels of a picture, in which one plot stands above the other.
_WIDTH, _HEIGHT = 1350, 1050
_COLOUR = "#0969da"
#: The font of a picture: its package, its file there, and the name in that file.
_FONT_PACKAGE, _FONT_FILE, _FONT = "font_hanken_grotesk", "files/HankenGrotesk-Regular.otf", "Hanken Grotesk"
#: Letters of a sentence that fit into a picture's line; the terminal has all of it.
_LETTERS = 170

#: JSON of the gateway: of ``/summary``, of its histogram, of ``/rates``.
Told = Mapping[str, Any]
#: Why a gateway that is older than the plugin has no rates.
OLDER_GATEWAY = "this gateway does not tell it: bring it to the plugin's version"


def histogram_lines(histogram: Told) -> list[str]:
    """Return a histogram as bars of text."""
    if not histogram["counted"]:
        return [f"{histogram['quantity']}: there is no result yet"]
    counts, edges = histogram["counts"], histogram["edges"]
    bins = [(f"{low:.5f} to {high:.5f}", count) for low, high, count in zip(edges, edges[1:], counts, strict=False)]
    rows = [*_outside(histogram, "below"), *bins, *_outside(histogram, "above")]
    filled = [place for place, (_, count) in enumerate(rows) if count] or [0]
    rows = rows[filled[0] : filled[-1] + 1]  # most results are in few bins of those that fit all models
    most = max(1, *(count for _, count in rows))
    lines = [f"{histogram['quantity']} of {number(histogram['counted'])} results{_sampled(histogram)}"]
    for name, count in rows:
        lines.append(f"  {name:<18}  {'█' * round(_BAR * count / most):<{_BAR}} {number(count)}")
    return lines


def _outside(histogram: Told, place: str) -> list[tuple[str, int]]:
    """Return the row of what lies below or above the bins, if anything does; older gateways tell no ``below``."""
    count = histogram.get(place, 0)
    return [(place, count)] if count else []


def rate_lines(told: Told | str) -> list[str]:
    """Return the rate over time as columns of text; ``told`` is what the gateway tells, or why it tells nothing."""
    missing = _missing_rates(told)
    if isinstance(told, str) or missing:
        return [f"rate over time: {missing}"]
    rates = told["rates"]
    most, cells = max(rates), max(1, _CELLS // len(rates))
    label = _brief(most)
    lines = [f"results per second over time, each column {_seconds(told)}{_sampled(told)}"]
    for row in reversed(range(_ROWS)):
        name = label if row == _ROWS - 1 else "0" if row == 0 else ""
        columns = "".join(_column(rate / most * _ROWS - row) * cells for rate in rates)
        lines.append(f"  {name:>{len(label)}} ┤{columns.rstrip()}")
    first, last = _clock(told["first_arrival"]), _clock(told["last_arrival"])
    lines.append(f"  {'':>{len(label)}}  {first}{last:>{max(len(last) + 1, len(rates) * cells - len(first))}}")
    return lines


def _column(height: float) -> str:
    """Return the cell of a column that reaches so many cells beyond its lower edge."""
    return _EIGHTHS[max(0, min(8, round(8 * height)))]


def _missing_rates(told: Told | str) -> str:
    """Return why there is no rate over time; empty if there is."""
    if isinstance(told, str):
        return told
    if not told["counted"]:
        return "there is no result yet"
    return "" if told["rates"] else "all results arrived at one moment"


def _sampled(told: Told) -> str:
    return ", a sample" if told["sampled"] else ""


def _seconds(told: Told) -> str:
    return f"{_brief(told['seconds'])} s"


def _brief(value: float) -> str:
    """Return a number with one decimal, or two digits if it is below one: never 0 for what is more."""
    return number(round(value, 1)) if value >= 1 else f"{value:.2g}"


def _clock(moment: str) -> str:
    return f"{datetime.fromisoformat(moment):%H:%M:%S}"


def check_png(file: Path) -> None:
    """UserError if the file exists or cannot be: before anything is asked."""
    try:
        exists = file.exists()
    except OSError as error:
        raise _unwritable(file, error) from error
    if exists:
        raise _exists(file)


def write_png(file: Path, summary: Told, rates: Told | str) -> None:
    """Draw both plots into a new file. UserError if there is nothing to draw, or the file cannot be written."""
    known = summary["round"]
    if not summary["histogram"]["counted"]:
        raise UserError(f"--png: no result of {known['namespace']}/{known['name']} is stored yet: draw it later")
    head = f"{known['namespace']}/{known['name']}: {number(known['stored'])} results"
    _write_new(file, _png(_rates_svg(head, rates), _histogram_svg(summary["histogram"])))


def _png(above: str, below: str) -> bytes:
    """Return a picture of two drawings, one above the other."""
    from resvg_py import svg_to_bytes  # noqa: PLC0415 - few commands draw, and all start

    half = f'width="{_WIDTH}" height="{_HEIGHT // 2}"'
    both = f'<svg {half}>{above}</svg><svg y="{_HEIGHT // 2}" {half}>{below}</svg>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}">{both}</svg>'
    with resources.as_file(resources.files(_FONT_PACKAGE) / _FONT_FILE) as font:
        # With no font but this one a picture is the same on all machines.
        return bytes(svg_to_bytes(svg, background="white", skip_system_fonts=True, font_files=[str(font)]))


def _rates_svg(head: str, told: Told | str) -> str:
    title = f"{head}\nRate over time{'' if isinstance(told, str) else _sampled(told)}"
    missing = _missing_rates(told)
    if isinstance(told, str) or missing:
        return _svg([], [], title=title, no_data_text=shorten(missing, _LETTERS, placeholder=" …"))
    edges = [told["seconds"] * place for place in range(len(told["rates"]) + 1)]
    return _svg(
        told["rates"],
        edges,
        title=title,
        x_title=f"seconds after {told['first_arrival']}",
        y_title="results per second",
    )


def _histogram_svg(told: Told) -> str:
    outside = [*_outside(told, "below"), *_outside(told, "above")]
    named = "".join(f", {number(count)} are {place}" for place, count in outside)
    title = f"Histogram of {number(told['counted'])} results{_sampled(told)}{named}"
    return _svg(told["counts"], told["edges"], title=title, x_title=told["quantity"], y_title="results")


def _svg(heights: Sequence[float], edges: Sequence[float], **texts: str) -> str:
    """Return a drawing of columns between edges."""
    from pygal import Histogram  # noqa: PLC0415 - few commands draw, and all start
    from pygal.style import Style  # noqa: PLC0415

    style = Style(
        background="white",
        plot_background="white",
        colors=(_COLOUR,),
        opacity="1",
        font_family=_FONT,
        label_font_size=14,
        major_label_font_size=14,
        title_font_size=20,
        no_data_font_size=14,
    )
    chart = Histogram(
        **texts,
        style=style,
        width=_WIDTH,
        height=_HEIGHT // 2,
        js=[],
        show_legend=False,
        disable_xml_declaration=True,
        include_x_axis=True,
        value_formatter="{:.6g}".format,
        x_value_formatter="{:.6g}".format,
        show_y_guides=bool(edges),  # without columns a sentence stands there
        show_x_labels=bool(edges),
        show_y_labels=bool(edges),
    )
    chart.add("", list(zip(heights, edges, edges[1:], strict=False)))
    return str(chart.render(is_unicode=True))


def _write_new(file: Path, content: bytes) -> None:
    try:
        with file.open("xb") as target:
            target.write(content)
    except FileExistsError as error:
        raise _exists(file) from error
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> UserError:
    return UserError(f'--png: "{file}" cannot be written ({error.strerror}): name another file')


def _exists(file: Path) -> UserError:
    return UserError(f'--png: "{file}" exists: name another file, or delete it')
