# SPDX-License-Identifier: Apache-2.0
"""Plots of what a gateway tells of a round's results, in a terminal and as a PNG: rate over time, and a histogram.

matplotlib draws the PNG. It is no part of every installation: with what it needs it is larger than the rest of the
plugin, and its archives bring libraries for four releases of Python.
"""

from collections.abc import Mapping
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poc_operator.cli.cluster import UserError
from poc_operator.cli.output import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 40
#: Cells of the plot of rates: so many high, and at most so many wide.
_ROWS, _CELLS = 6, 60
_EIGHTHS = " ▁▂▃▄▅▆▇█"
#: Inches of a picture, and its pixels for each.
_SIZE, _DPI = (9.0, 7.0), 150
_COLOUR = "#0969da"

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
    """UserError if matplotlib is missing, or the file exists or cannot be: before anything is asked."""
    _figure()
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
    figure = _figure()
    over_time, values = figure.subplots(2)
    figure.suptitle(f"{known['namespace']}/{known['name']}: {number(known['stored'])} results")
    _draw_rates(over_time, rates)
    _draw_histogram(values, summary["histogram"])
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    _write_new(file, drawn.getvalue())


def _figure() -> "Figure":
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - it takes a while to load, and may be missing
    except ImportError as error:
        remedy = "install the plugin with locks/plots.txt (docs/operate/kubectl-poc.md), or use --output json"
        raise UserError(f"--png: this installation has no matplotlib: {remedy}") from error
    return Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")


def _draw_rates(axes: "Axes", told: Told | str) -> None:
    missing = _missing_rates(told)
    axes.set_title(f"Rate over time{'' if isinstance(told, str) else _sampled(told)}")
    if isinstance(told, str) or missing:
        axes.text(0.5, 0.5, missing, ha="center", va="center", wrap=True)
        axes.set_axis_off()
        return
    edges = [told["seconds"] * place for place in range(len(told["rates"]) + 1)]
    axes.stairs(told["rates"], edges, fill=True, color=_COLOUR)
    axes.set_xlabel(f"seconds after {told['first_arrival']}")
    axes.set_ylabel("results per second")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)


def _draw_histogram(axes: "Axes", told: Told) -> None:
    outside = [*_outside(told, "below"), *_outside(told, "above")]
    named = "".join(f", {number(count)} are {place}" for place, count in outside)
    axes.set_title(f"Histogram of {number(told['counted'])} results{_sampled(told)}{named}")
    axes.stairs(told["counts"], told["edges"], fill=True, color=_COLOUR)
    axes.set_xlabel(told["quantity"])
    axes.set_ylabel("results")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)


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
