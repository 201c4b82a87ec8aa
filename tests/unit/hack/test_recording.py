# SPDX-License-Identifier: Apache-2.0
"""The recording of a terminal: what a real one gets, and the picture that plays it."""

import json
import os
import re
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hack.deploy.kube import Kube
from hack.recording import __main__ as program
from hack.recording import animation, cast
from hack.recording.cast import Cast, Recorder, read
from hack.toolchain.common import UserError

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TYPE_SECONDS", "ENTER_SECONDS", "REST_SECONDS"):
        monkeypatch.setattr(cast, name, 0.0)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Cast(60, 8, "a test"), os.environ, tmp_path)


def _text(recorded: Cast) -> str:
    return "".join(text for _, text in recorded.events)


def _shown(*events: tuple[float, str], columns: int = 40, rows: int = 4) -> list[list[str]]:
    """Return the rows of each screen as texts."""
    film = animation.screens(Cast(columns, rows, "a test", list(events)))
    return [[" ".join(run.text for run in row) for row in screen.rows] for screen in film]


def test_a_command_runs_in_a_terminal_of_the_size(recorder: Recorder) -> None:
    recorder.run("stty size; tty -s && printf 'a \\033[31mred\\033[0m word…\\n'", 10)
    assert _text(recorder.cast).endswith("8 60\r\na \x1b[31mred\x1b[0m word…\r\n")
    assert "stty size; tty -s" in _text(recorder.cast)
    moments = [at for at, _ in recorder.cast.events]
    assert moments == sorted(moments)


def test_moments_are_those_of_the_output(recorder: Recorder) -> None:
    recorder.run("printf first; sleep 0.5; printf second", 10)
    at = {text: moment for moment, text in recorder.cast.events}
    assert 0.4 < at["second"] - at["first"] < 5


def test_a_command_that_fails_is_no_recording(recorder: Recorder) -> None:
    with pytest.raises(UserError, match=r"exit 3 ended with exit status 3: mend it, .* It said:\nno such thing"):
        recorder.run("echo no such thing; exit 3", 10)


def test_a_command_that_does_not_end_is_ended(recorder: Recorder, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=r"runs for more than 0 s"):
        recorder.run("sleep 60 & echo $! > child; wait", 0.4)
    assert time.monotonic() - began < 20
    child = (tmp_path / "child").read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True, check=False).stdout
    assert state.strip()[:1] in {"", "Z"}


def test_a_letter_may_come_in_parts(recorder: Recorder) -> None:
    recorder.run("printf '\\342\\226'; sleep 0.2; printf '\\210 done'", 10)
    assert _text(recorder.cast).endswith("█ done")


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    recorded, file = Cast(60, 8, "a test", [(0.1, "█ a\r\n"), (1.25, "b")]), tmp_path / "a.cast"
    recorded.write(file)
    first, *others = [json.loads(line) for line in file.read_text().splitlines()]
    assert (first["version"], first["width"], first["height"]) == (2, 60, 8)
    assert others == [[0.1, "o", "█ a\r\n"], [1.25, "o", "b"]]
    assert read(file) == recorded


def test_what_was_recorded_is_what_its_file_holds(recorder: Recorder, tmp_path: Path) -> None:
    recorder.run("for number in 1 2 3 4 5 6 7 8; do echo $number; sleep 0.03; done", 10)
    recorder.cast.write(tmp_path / "a.cast")
    written = read(tmp_path / "a.cast")
    assert written == recorder.cast
    assert animation.draw(written) == animation.draw(recorder.cast)


@pytest.mark.parametrize("text", ["", "no JSON", '{"version": 2}', "[]", '{"version": 2, "width": 1, "height": 1}\n7'])
def test_other_files_are_no_recordings(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.cast"
    file.write_text(text)
    with pytest.raises(UserError, match="no recording of asciinema's format"):
        read(file)
    with pytest.raises(UserError, match="no recording"):
        read(tmp_path / "nothing.cast")


def test_another_version_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.cast"
    file.write_text('{"version": 3}\n')
    with pytest.raises(UserError, match="has version 3 of asciinema's format"):
        read(file)


def test_a_screen_is_what_a_terminal_shows() -> None:
    film = _shown((0.0, "one\r\ntwo\r\n"), (1.0, "\x1b[1A\x1b[2KTWO\r\n"), (2.0, "\x1b[31mred\x1b[0m  end"))
    assert film == [["one", "two", "", ""], ["one", "TWO", "", ""], ["one", "TWO", "red end", ""]]


def test_what_scrolls_out_is_gone() -> None:
    assert _shown((0.0, "".join(f"{number}\r\n" for number in range(9))))[-1] == ["6", "7", "8", ""]


def test_screens_that_are_gone_at_once_are_left_out() -> None:
    events = [(number / 100, str(number % 10)) for number in range(100)]
    film = animation.screens(Cast(120, 1, "a test", events))
    assert len(film) == 10
    assert all(after.at - before.at > 0.099 for before, after in pairwise(film))
    assert film[-1].rows[0][0].text == "0123456789" * 10  # but never the last
    assert len(_shown((0.0, "a"), (1.0, "\x1b[0m"), (2.0, "b"))) == 2  # nor is one drawn twice


def test_colours_and_columns_are_kept() -> None:
    (screen,) = animation.screens(Cast(40, 1, "a test", [(0.0, "\x1b[1;32m$\x1b[0m name   \x1b[91mred\x1b[0m x  y")]))
    runs = [(run.column, run.text, run.colour, run.bold) for run in screen.rows[0]]
    assert runs == [
        (0, "$", "green", True),
        (2, "name", "text", False),
        (9, "red", "red", False),
        (13, "x", "text", False),
        (16, "y", "text", False),
    ]


def _picture() -> ElementTree.Element:
    events = [(0.0, "$ ls <&>\r\n"), (1.0, "one\r\n"), (2.0, "two\r\n"), (6.0, "\x1b[2J\x1b[Hthree")]
    return ElementTree.fromstring(animation.draw(Cast(40, 4, "R & D", events)))  # noqa: S314 - it is ours


def test_the_picture_has_each_screen_once_and_each_row_once() -> None:
    picture = _picture()
    rows = {
        row.get("id"): [text.text for text in row.iter(f"{SVG}text")]
        for row in picture.iter(f"{SVG}g")
        if row.get("id")
    }
    assert sorted(rows.values()) == [["$ ls <&>"], ["one"], ["three"], ["two"]]
    film = [group for group in picture.iter(f"{SVG}g") if group.get("transform")]
    used = [[rows[use.attrib["href"][1:]][0] for use in screen.iter(f"{SVG}use")] for screen in film]
    assert used == [["$ ls <&>"], ["$ ls <&>", "one"], ["$ ls <&>", "one", "two"], ["three"]]
    assert picture.findtext(f"{SVG}title") == "R & D"


def test_the_picture_asks_for_nothing_else() -> None:
    drawn = ElementTree.tostring(_picture(), encoding="unicode")
    assert re.findall(r"(?:href|src)=\"(?!#)[^\"]*|url\(|@import|<script", drawn) == []


def test_a_picture_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(animation, "MOST_BYTES", 500)
    with pytest.raises(UserError, match="more than 500: record less"):
        _picture()
    with pytest.raises(UserError, match="empty"):
        animation.draw(Cast(40, 4, "a test"))


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1])
def test_every_colour_can_be_read_on_its_ground(scheme: int) -> None:
    colours = {name: pair[scheme] for name, pair in animation._COLOURS.items()}
    ground = _luminance(colours.pop("ground"))
    contrasts = {
        name: (max(ground, _luminance(colour)) + 0.05) / (min(ground, _luminance(colour)) + 0.05)
        for name, colour in colours.items()
    }
    assert {name: round(found, 1) for name, found in contrasts.items() if found < 4.5} == {}


def test_the_commands_are_those_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "the kubectl"
    kubectl.write_text('#!/bin/sh\n[ "$1" = poc ] && shift && exec kubectl-poc "$@"\necho "kubectl $*"\n')
    kubectl.chmod(0o755)
    folder = tmp_path / "bin"
    folder.mkdir()
    kube = Kube(kubectl_path=kubectl, helm_path=kubectl, kubeconfig=tmp_path / "config")
    recorder = Recorder(Cast(100, 30, "a test"), program._environment(kube, folder), tmp_path)
    recorder.run("kubectl get pods && kubectl poc fleet presets && echo $KUBECONFIG", 60)
    told = _text(recorder.cast)
    assert "kubectl get pods\r\n" in told
    assert "minimax-m2.7" in told
    assert str(tmp_path / "config") in told


def test_the_picture_of_the_readme_is_drawn_from_its_recording() -> None:
    recorded = read(program.CAST)
    assert recorded.seconds <= program.MOST_SECONDS
    assert (recorded.columns, recorded.rows) == (program.COLUMNS, program.ROWS)
    assert program.PICTURE.read_text() == animation.draw(recorded)
    assert all(command in re.sub(r"\x1b\[[0-9;]*m", "", _text(recorded)) for command in program.COMMANDS)


def test_a_recording_ends_within_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl, asked = tmp_path / "kubectl", tmp_path / "asked"
    kubectl.write_text(f'#!/bin/sh\necho "$*" >> {asked}\n')
    kubectl.chmod(0o755)
    kube = Kube(kubectl_path=kubectl, helm_path=kubectl, kubeconfig=tmp_path / "config")
    monkeypatch.setattr(program, "COMMANDS", ("kubectl get pods", "true"))
    recorded = program.record(kube)
    # What an earlier recording left makes room, and nobody sees it.
    deleted, typed = asked.read_text().splitlines()
    assert (deleted.split()[2:5], typed) == (["delete", "pocround", "recording"], "get pods")
    assert "delete" not in _text(recorded)
    monkeypatch.setattr(program, "MOST_SECONDS", 0.0)
    with pytest.raises(UserError, match="more than 0: shorten COMMANDS"):
        program.record(kube)
