# SPDX-License-Identifier: Apache-2.0
"""The plots of ``round results``: in a terminal, and as a PNG that really is one."""

import errno
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hack.images.site import ROOT
from hack.release.kubectl_plugin import LOCK
from poc_gateway.query.messages import Rates
from poc_operator.cli import plots
from poc_operator.cli.cluster import UserError
from tests.support.fakes.api_paths import ApiPaths
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Run

RATES = f"{seen.GATEWAY}/rounds/poc/round-1/rates"
SUMMARY = f"{seen.GATEWAY}/rounds/poc/round-1/summary"
COMMAND = ("round", "results", "round-1")


@pytest.fixture(autouse=True)
def _stored(api: ApiPaths) -> None:
    api.answers |= seen.a_gateway() | seen.stored_results()


def _told(rates: Sequence[float], **more: object) -> dict[str, object]:
    return {**seen.stored_results(rates=rates)[RATES], **more}


def test_the_rate_over_time_is_shown_as_columns(run: Run) -> None:
    lines = run(*COMMAND).out.splitlines()
    begin = lines.index("results per second over time, each column 5 s")
    rows = lines[begin + 1 : begin + 7]
    # 30 results a second fill the height of six cells, 10 a third of it, 20 two thirds; nothing came in the third span.
    heights = [sum(row[6 + 15 * place : 7 + 15 * place].strip() != "" for row in rows) for place in range(4)]
    assert heights == [2, 6, 0, 4]
    assert (rows[0].split()[0], rows[-1].split()[0]) == ("30", "0")
    assert lines[begin + 7].split() == ["08:00:00", "08:00:20"]


@pytest.mark.parametrize(("second", "lowest"), [(24.0, "█"), (4.0, "▄"), (1.0, "▁"), (0.4, " ")])
def test_a_cell_of_a_column_has_eight_steps(second: float, lowest: str) -> None:
    columns = plots.rate_lines(_told([48.0, second]))[6].partition("┤")[2]
    assert columns.ljust(60) == "█" * 30 + lowest * 30


@pytest.mark.parametrize(
    ("most", "label"), [(123_456.7, "123 456.7"), (9.96, "10"), (1.25, "1.2"), (0.96, "0.96"), (0.0123, "0.012")]
)
def test_the_highest_rate_is_told_however_slow_it_is(most: float, label: str) -> None:
    assert plots.rate_lines(_told([most, most / 2]))[1].partition("┤")[0].strip() == label


def test_the_width_of_a_column_is_told_however_short_it_is() -> None:
    assert plots.rate_lines(_told([1.0], seconds=0.04))[0].endswith("each column 0.04 s")


@pytest.mark.parametrize("count", [1, 7, 29, 60])
def test_the_plot_is_no_wider_than_a_terminal(count: int) -> None:
    lines = plots.rate_lines(_told([123_456.7] * count))
    assert max(map(len, lines)) <= 79
    assert "█" * (60 // count * count) in lines[1]


@pytest.mark.parametrize(
    ("counts", "more", "shown"),
    [
        ((0, 0, 5, 0, 7, 0), {}, ["5", "0", "7"]),
        ((0, 5, 0), {}, ["5"]),
        ((0, 5, 0), {"above": 2}, ["5", "0", "2"]),
        ((0, 5, 0), {"below": 3}, ["3", "0", "5"]),
        ((0, 0), {"above": 2}, ["2"]),
        ((0, 0), {"counted": 4}, ["0"]),  # of an older gateway, which tells not what is below
    ],
)
def test_a_histogram_has_no_empty_rows_at_its_ends(
    counts: Sequence[int], more: dict[str, int], shown: list[str]
) -> None:
    told = seen.stored_results(counts)[SUMMARY]["histogram"] | {"counted": 9} | more
    assert [line.split()[-1] for line in plots.histogram_lines(told)[1:]] == shown


def test_the_answers_of_these_tests_are_those_of_the_gateway() -> None:
    Rates.model_validate(_told([1.0]))
    assert set(_told([1.0])) == set(Rates.model_fields)


def test_a_sample_is_called_one() -> None:
    assert plots.rate_lines(_told([1.0], sampled=True))[0].endswith(", a sample")


def test_without_results_a_sentence_stands_for_each_plot(run: Run, api: ApiPaths) -> None:
    api.answers |= seen.stored_results(counts=(), rates=())
    done = run(*COMMAND)
    assert done.code == 0, done.err
    assert "rate over time: there is no result yet" in done.out
    assert "vector norm: there is no result yet" in done.out
    assert "█" not in done.out


def test_results_of_one_moment_have_no_rate(run: Run, api: ApiPaths) -> None:
    api.answers[RATES] = _told([])
    assert "rate over time: all results arrived at one moment" in run(*COMMAND).out


def test_an_older_gateway_tells_no_rate_over_time(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    api.answers[RATES] = (404, {"detail": "Not Found"})
    done = run(*COMMAND, "--png", str(tmp_path / "plots.png"))
    assert (done.code, "400 results of 2 slots" in done.out) == (0, True), done.err
    assert "rate over time: this gateway does not tell it: bring it to the plugin's version" in done.out
    assert json.loads(run(*COMMAND, "-o", "json").out)["rates"] is None
    assert (tmp_path / "plots.png").is_file()


@pytest.mark.parametrize("status", [403, 500, 503])
def test_rates_that_are_refused_cost_nothing_else(run: Run, api: ApiPaths, tmp_path: Path, status: int) -> None:
    api.answers[RATES] = (status, {"detail": "out of order"})
    done = run(*COMMAND, "--png", str(tmp_path / "plots.png"))
    assert (done.code, "400 results of 2 slots" in done.out) == (0, True), done.err
    (why,) = [line for line in done.out.splitlines() if line.startswith("rate over time: ")]
    assert "this gateway does not tell it" not in why
    assert (tmp_path / "plots.png").is_file()
    done = run(*COMMAND, "-o", "json")
    assert (done.code, json.loads(done.out)["rates"]) == (0, None)
    assert done.err == f"{why}\n"


def test_programs_get_the_rates(run: Run) -> None:
    assert json.loads(run(*COMMAND, "-o", "json").out)["rates"]["rates"] == [10.0, 30.0, 0.0, 20.0]


def _painted(run: Run, file: Path) -> tuple[int, int]:
    """Draw the plots; return how many pixels of each half have the colour of data."""
    done = run(*COMMAND, "--png", str(file))
    assert (done.code, done.err) == (0, f"plots drawn into {file}\n")
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = np.asarray(Image.open(file).convert("RGB"), dtype=float) / 255
    assert pixels.shape[:2] == (1050, 1350)
    blue = np.all(np.abs(pixels[:, :, :3] - np.array([0x09, 0x69, 0xDA]) / 255) < 0.01, axis=2)
    return int(blue[:525].sum()), int(blue[525:].sum())


def test_a_png_has_both_plots_of_the_data(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    above, below = _painted(run, tmp_path / "first.png")
    assert (above > 20_000, below > 20_000) == (True, True)
    api.answers |= seen.stored_results(rates=(30.0, 30.0, 30.0, 30.0))
    full, same = _painted(run, tmp_path / "second.png")
    assert full == pytest.approx(2 * above, rel=0.02)  # half of the area of the first was empty
    assert same == below
    api.answers |= seen.stored_results(counts=(400, 400), rates=(30.0, 30.0, 30.0, 30.0))
    assert _painted(run, tmp_path / "third.png")[1] == pytest.approx(2 * below, rel=0.02)


def test_a_png_comes_with_what_programs_read(run: Run, tmp_path: Path) -> None:
    done = run(*COMMAND, "-o", "json", "--png", str(tmp_path / "plots.png"))
    assert json.loads(done.out)["summary"]["rate"] == 99.5


@pytest.mark.parametrize("rates", [(), None])
def test_a_png_says_why_it_has_no_rate(run: Run, api: ApiPaths, tmp_path: Path, rates: Sequence[float] | None) -> None:
    api.answers[RATES] = (404, {}) if rates is None else _told(rates)
    above, below = _painted(run, tmp_path / "plots.png")
    assert (above, below > 20_000) == (0, True)


def test_a_file_that_exists_is_kept(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    file = tmp_path / "plots.png"
    file.write_text("mine")
    done = run(*COMMAND, "--png", str(file))
    assert (done.code, done.err) == (1, f'error: --png: "{file}" exists: name another file, or delete it\n')
    assert file.read_text() == "mine"
    assert api.asked == []


def test_a_file_that_comes_meanwhile_is_kept(tmp_path: Path) -> None:
    file, told = tmp_path / "plots.png", seen.stored_results()
    plots.check_png(file)
    file.write_text("mine")
    with pytest.raises(UserError, match="exists: name another file"):
        plots.write_png(file, told[SUMMARY], told[RATES])
    assert file.read_text() == "mine"


@pytest.mark.parametrize("file", ["nowhere/plots.png", "config/plots.png"])
def test_a_file_that_cannot_be_written_is_named(run: Run, tmp_path: Path, file: str) -> None:
    done = run(*COMMAND, "--png", str(tmp_path / file))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f'--png: "{tmp_path / file}" cannot be written (No' in done.err


def test_a_name_that_is_too_long_is_refused_before_anything_is_asked(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    file = tmp_path / f"{'x' * 300}.png"
    done = run(*COMMAND, "--png", str(file))
    assert (done.code, api.asked) == (1, [])
    assert done.err == f'error: --png: "{file}" cannot be written (File name too long): name another file\n'


def test_a_folder_without_access_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: Path, **__: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")  # root, as which tests may run, has access

    monkeypatch.setattr(Path, "stat", refuses)
    monkeypatch.setattr(Path, "exists", refuses)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\): name another file"):
        plots.check_png(tmp_path / "plots.png")


def test_without_results_nothing_is_drawn(run: Run, api: ApiPaths, tmp_path: Path) -> None:
    api.answers |= seen.stored_results(counts=(), rates=())
    done = run(*COMMAND, "--png", str(tmp_path / "plots.png"))
    assert (done.code, done.err) == (1, "error: --png: no result of poc/round-1 is stored yet: draw it later\n")
    assert not (tmp_path / "plots.png").exists()


#: Draws plots where nothing can be imported but the standard library, the plugin, and what a lock names.
_DRAW = """
import importlib.metadata, json, re, sys
from pathlib import Path

locked, told, file = set(json.loads(sys.argv[1])), json.loads(sys.argv[2]), Path(sys.argv[3])
sys.path[:0] = json.loads(sys.argv[4])
of_module = importlib.metadata.packages_distributions()

class OnlyLocked:
    def find_spec(self, name, path=None, target=None):
        owners = {re.sub("[-_.]+", "-", owner).lower() for owner in of_module.get(name.partition(".")[0], ())}
        if owners and not owners & locked:
            raise ModuleNotFoundError(f"the lock has none of {owners}, which have {name}", name=name)

sys.meta_path.insert(0, OnlyLocked())
import poc_operator.cli.program
from poc_operator.cli import plots
plots.write_png(file, *told)
"""


def _draw_with(packages: set[str], file: Path) -> "subprocess.CompletedProcess[str]":
    told = seen.stored_results()
    words = [sorted(packages), [told[SUMMARY], told[RATES]], file, [ROOT / "operator", ROOT / "image"]]
    texts = [str(word) if isinstance(word, Path) else json.dumps(word, default=str) for word in words]
    return subprocess.run([sys.executable, "-c", _DRAW, *texts], capture_output=True, text=True, check=False)


def test_a_png_needs_no_package_beyond_those_of_krews_archive(tmp_path: Path) -> None:
    locked = set(re.findall(r"^([a-z0-9-]+)==", LOCK.read_text(), re.MULTILINE))
    done = _draw_with(locked, tmp_path / "plots.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")
    # What is in the environment of tests alone is really kept away.
    done = _draw_with(locked - {"pygal"}, tmp_path / "other.png")
    assert "the lock has none of {'pygal'}" in done.stderr


def test_a_png_has_its_words_on_a_machine_without_fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are there, and come from the font that the plugin brings: without it the picture differs."""
    told = seen.stored_results()
    plots.write_png(tmp_path / "words.png", told[SUMMARY], told[RATES])
    monkeypatch.setattr(plots, "_FONT", "no such font")
    plots.write_png(tmp_path / "none.png", told[SUMMARY], told[RATES])
    dark = [(np.asarray(Image.open(tmp_path / f"{name}.png").convert("L")) < 100).sum() for name in ("words", "none")]
    assert dark[0] > dark[1] + 1000
