# SPDX-License-Identifier: Apache-2.0
"""What a person sees while something is built or waited for: bars on a terminal, plain lines elsewhere."""

import io
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from hack.images.site import Role
from hack.toolchain import board, durations, steps
from hack.toolchain.board import Bar, Board, time_left
from hack.toolchain.common import UserError
from hack.toolchain.steps import step
from hack.toolchain.tools import TOOL_SETS

ROOT = Path(__file__).parents[3]
COLUMNS, ROWS = 80, 24
ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("POC_HOME", str(tmp_path))
    return tmp_path


def screen(written: str) -> list[str]:
    """Return the lines of a terminal to which this was written, without the blanks at their ends."""
    lines, row, column = [""], 0, 0
    for word in re.findall(r"\x1b\[\d*[AJ]|.", written, re.DOTALL):
        if word == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif word == "\r":
            column = 0
        elif word.startswith(ESCAPE):
            if word.endswith("A"):
                row -= int(word[2:-1])
                assert row >= 0
            else:
                del lines[row + 1 :]
                lines[row] = lines[row][:column]
        else:
            lines[row] = lines[row][:column].ljust(column) + word + lines[row][column + 1 :]
            column += 1
            assert column < COLUMNS, "a line reaches the last column"
    return [line.rstrip() for line in lines if line.strip()]


class Terminal:
    """A program with a terminal of its own; what it writes, as the terminal gets it."""

    def __init__(self, script: str, home: Path) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (ROWS, COLUMNS))
        self.before = termios.tcgetattr(self.slave)
        self.written = ""
        environment = {**os.environ, "POC_HOME": str(home), "TERM": "xterm", "COLUMNS": "300"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=ROOT,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.written += os.read(self.master, 4096).decode()
            except OSError:
                return

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 20
        while text not in self.written:
            assert time.monotonic() < end, self.written
            time.sleep(0.02)

    def end(self) -> tuple[int, list[str]]:
        """Wait for the program's end; return its exit status, and what the screen shows then."""
        status = self.process.wait(20)
        # What the kernel still holds is read before the last writer is gone.
        os.close(self.slave)
        self._reader.join(5)
        os.close(self.master)
        return status, screen(self.written.replace("\r\n", "\n\r"))


def test_the_time_left_is_never_negative_and_never_too_precise() -> None:
    chance = random.Random(7)  # noqa: S311 - cases, not secrets
    for _ in range(300):
        expected = chance.uniform(0, 2000)
        shortest = float("inf")
        for elapsed in sorted(chance.uniform(0, 3000) for _ in range(50)):
            words = time_left(elapsed, expected)
            if found := re.fullmatch(r"about (\d+) (min|s) left", words):
                left = int(found[1]) * (60 if found[2] == "min" else 1)
                assert left % 10 == 0
                assert 0 < expected - elapsed <= left <= shortest
                shortest = left
            else:
                assert words == ("a few seconds left" if elapsed < expected else "longer than expected")


def test_nothing_is_claimed_of_what_nobody_has_measured() -> None:
    bar = Bar("etcd")
    assert time_left(5, None) == ""
    assert "left" not in bar.line(80)
    assert "###" in bar.line(80)


def test_a_bar_fits_and_is_not_full_before_the_end() -> None:
    bar = Bar("helm", expected=10, detail="line one\nline two \x1b[2J" + "x" * 300)
    bar.begun -= 1000
    for width in (1, 10, 79, 200):
        assert len(bar.line(width)) <= width
    assert "#" * 19 + ".]" in bar.line(79)
    assert "longer than expected" in bar.line(200)
    assert bar.line(200).isprintable()
    assert "  longer than expected  line one line two [2Jxxx" in bar.line(200)


def test_a_terminal_that_became_narrower_is_cleared_wholly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    out = Screen()
    monkeypatch.setattr(sys, "stdout", out)
    size = os.terminal_size((80, 24))
    monkeypatch.setattr(board, "_size", lambda: size)
    shown, bar = Board(), Bar("pods", detail="x" * 100)
    shown.begin(bar, "")
    assert len(out.getvalue()) == 79
    size = os.terminal_size((40, 24))
    shown.end(bar, "pods: 1.0 s")
    # 79 characters take two rows of 40.
    assert f"\r{ESCAPE}[1A{ESCAPE}[Jpods: 1.0 s\n" in out.getvalue()


def test_more_stages_than_lines_stay_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_size", lambda: os.terminal_size((80, 3)))
    monkeypatch.setattr(board, "on_terminal", lambda: True)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    shown = Board()
    bars = [Bar(f"stage {number}") for number in range(9)]
    for bar in bars:
        shown.begin(bar, "")
    assert max(len(part.split("\n")) for part in out.getvalue().split(f"{ESCAPE}[J")) == 2
    for bar in bars:
        shown.end(bar, "")


def test_stages_of_several_threads_leave_one_line_each(home: Path) -> None:
    script = """
from concurrent.futures import ThreadPoolExecutor
from hack.toolchain.board import BOARD
from hack.toolchain.steps import step
import time
def work(name):
    with step(name) as one:
        one.tell("half way\\nthrough")
        time.sleep(1.2)
        BOARD.say(f"{name} says so")
with step("all"), ThreadPoolExecutor() as pool:
    list(pool.map(work, ["one", "two", "three"]))
"""
    terminal = Terminal(script, home)
    terminal.wait_for("half way through")
    status, lines = terminal.end()
    assert status == 0
    assert len(re.findall(r"one \[[.#]{20}\] 0:0\d", terminal.written)) >= 2
    said = [re.sub(r"\d\.\d s", "T", line) for line in lines]
    assert sorted(said) == sorted(
        [*(f"{name} says so" for name in ("one", "two", "three")), "one: T", "two: T", "three: T", "all: T"]
    )
    assert said[-1] == "all: T"


def test_a_build_outlives_the_terminal_that_shows_it(home: Path) -> None:
    script = f"""
import time
from pathlib import Path
from hack.toolchain.board import BOARD
from hack.toolchain.steps import step
with step("cluster up") as one:
    while not Path({str(home / "gone")!r}).exists():
        time.sleep(0.02)
    BOARD.say("the first that fails")
    with step("etcd") as other:
        other.tell("starts")
        time.sleep(0.7)
print("a line of the program's own")
Path({str(home / "built")!r}).touch()
"""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "POC_HOME": str(home), "TERM": "xterm"}
    program = [sys.executable, "-c", script]
    with subprocess.Popen(program, stdout=theirs, stderr=subprocess.PIPE, cwd=ROOT, env=environment) as process:
        os.close(theirs)
        assert b"cluster up" in os.read(ours, 4096)
        os.close(ours)
        (home / "gone").touch()
        _, told = process.communicate(timeout=20)
    assert (process.returncode, told) == (0, b"")
    assert (home / "built").exists()


@pytest.mark.parametrize(
    ("how", "resumes", "status", "last"),
    [
        ("interrupt", False, 130, "interrupted"),
        ("interrupt", True, 130, "interrupted: run the same command again, and it keeps what is done already"),
        ("raise UserError('the disk is full: free some')", True, 1, "error: the disk is full: free some"),
    ],
)
def test_what_ends_early_leaves_a_sane_terminal_and_says_why(
    home: Path, how: str, *, resumes: bool, status: int, last: str
) -> None:
    action = "time.sleep(60)" if how == "interrupt" else how
    script = f"""
import signal
import time
from hack.toolchain.common import UserError, main
from hack.toolchain.steps import step
def program():
    with step("cluster up"), step("etcd"):
        time.sleep(0.7)
        {action}
# Where the tests run in a shell's background, programs begin with interrupts ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
main(program, resumes={resumes})
"""
    terminal = Terminal(script, home)
    terminal.wait_for("etcd [")
    time.sleep(0.8)
    if how == "interrupt":
        terminal.process.send_signal(signal.SIGINT)
    found = terminal.end()
    ending = "interrupted" if how == "interrupt" else "failed"
    lines = [re.sub(r"\d\.\d s", "T", line) for line in found[1]]
    assert (found[0], lines) == (status, [f"etcd: {ending} after T", f"cluster up: {ending} after T", last])
    # Nothing but drawing: no mode that somebody would have to set back, no hidden cursor.
    assert set(re.findall(r"\x1b\[[0-9?]*.", terminal.written)) <= {"\x1b[J", "\x1b[1A"}


def test_the_builds_of_a_newcomer_say_that_they_keep_what_is_done() -> None:
    saying = {path for path in (ROOT / "hack").rglob("*.py") if "resumes=True" in path.read_text()}
    assert {str(path.relative_to(ROOT)) for path in saying} == {"hack/demo/__main__.py", "hack/prepare.py"}


def test_a_log_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter([(False, "0 of 2 pods ready"), (False, "0 of 2 pods ready"), (True, "2 of 2 pods ready")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "LOOK_SECONDS", 0.0)
        steps.follow("vLLM pods", lambda: next(looks), 10)
    with step("kubernetes v1.34.4", of="kubernetes"):
        pass
    with pytest.raises(UserError), step("etcd"):
        raise UserError("no")
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d\.\d s", "T", line) for line in lines] == [
        "vLLM pods: 0 of 2 pods ready",
        "vLLM pods: 2 of 2 pods ready (T)",
        "kubernetes v1.34.4: takes about 12 min",
        "kubernetes v1.34.4: T",
        "etcd: takes about 60 s",
        "etcd: failed after T",
    ]


class Log:
    """What a program prints where there is no terminal, with a board of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, quiet_seconds: float) -> None:
        self._out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", self._out)
        monkeypatch.setattr(board, "DRAW_SECONDS", 0.01)
        monkeypatch.setattr(board, "QUIET_SECONDS", quiet_seconds)
        monkeypatch.setattr(steps, "BOARD", Board())

    @property
    def lines(self) -> list[str]:
        return [re.sub(r"\d\.\d s", "T", line) for line in self._out.getvalue().splitlines()]

    def wait_for(self, line: str) -> None:
        end = time.monotonic() + 20
        while line not in self.lines:
            assert time.monotonic() < end, self.lines
            time.sleep(0.01)


def test_a_log_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch, quiet_seconds=0.05)
    still = "still under way: cluster up (0:00), kubernetes v1.34.4 (0:00, about 12 min left), pods (0:00"
    with step("cluster up"), step("kubernetes v1.34.4", of="kubernetes"), step("pods") as pods:
        log.wait_for(f"{still})")
        assert log.lines[0] == "kubernetes v1.34.4: takes about 12 min"
        # That a stage begins is told once. What it does after that is told with the rest.
        pods.tell("0 of 2\npods ready")
        pods.tell("1 of 2 pods ready")
        log.wait_for(f"{still}, 1 of 2 pods ready)")
    assert log.lines.count("pods: 0 of 2 pods ready") == 1
    assert "pods: 1 of 2 pods ready" not in log.lines
    assert log.lines[-3:] == ["pods: T", "kubernetes v1.34.4: T", "cluster up: T"]
    time.sleep(0.2)
    assert log.lines[-1] == "cluster up: T"


def test_a_log_that_is_not_silent_is_told_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch, quiet_seconds=20)
    with step("cluster up") as one:
        one.tell("starts")
        time.sleep(0.2)
    assert log.lines == ["cluster up: starts", "cluster up: T"]


def test_the_longest_of_the_last_runs_counts() -> None:
    assert durations.estimate("new") is None
    assert durations.estimate("etcd") == durations.MEASURED["etcd"]
    for seconds in (500.0, 30.0, 40.0, 35.0, 0.2):
        durations.record("etcd", seconds)
    # The first is forgotten, and the last had nothing to do.
    assert durations.estimate("etcd") == 40.0
    assert durations.estimate("helm") == durations.MEASURED["helm"]


def test_what_fails_is_not_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durations, "LEAST_SECONDS", 0.0)
        with pytest.raises(UserError), step("some stage"):
            raise UserError("no")
        assert durations.estimate("some stage") is None
        with step("some stage"):
            pass
        assert durations.estimate("some stage") is not None
    capsys.readouterr()


def test_stages_beside_each_other_are_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durations, "LEAST_SECONDS", 0.0)
    both = threading.Barrier(2, timeout=10)

    def build(name: str) -> None:
        with step(name):
            both.wait()

    threads = [threading.Thread(target=build, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in {durations.estimate(name) for name in ("one", "two")}
    capsys.readouterr()


def test_a_step_with_steps_inside_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durations, "LEAST_SECONDS", 0.0)
    with step("cluster up"):
        with step("a build"), step("its download"):
            pass
        with pytest.raises(UserError), step("fails"):
            raise UserError("no")
        with step("start"):
            pass
    stages = ("cluster up", "a build", "its download", "fails", "start")
    known = {stage for stage in stages if durations.estimate(stage) is not None}
    assert known == {"its download", "start"}
    # Next time there is nothing to build.
    with step("cluster up"):
        pass
    assert durations.estimate("cluster up") is not None
    capsys.readouterr()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"etcd": 3}',
        '{"etcd": ["soon"]}',
        '{"etcd": null}',
        "\x00",
        '{"etcd": [Infinity]}',
        '{"etcd": [-Infinity, NaN]}',
        '{"etcd": [1e999, -1, true]}',
        '{"etcd": [1%s]}' % ("0" * 400),
        '{"etcd": [[[1]]], "helm": {"etcd": 1}}',
        "[" * 100_000,
    ],
    ids=lambda content: content[:40],
)
def test_a_spoiled_file_is_as_good_as_none(home: Path, content: str) -> None:
    file = home / "cache" / "durations.json"
    file.parent.mkdir()
    file.write_text(content)
    assert durations.estimate("etcd") == durations.MEASURED["etcd"]
    durations.record("etcd", 12.0)
    assert durations.estimate("etcd") == 12.0


def test_what_is_a_time_is_kept_beside_what_is_none(home: Path) -> None:
    file = home / "cache" / "durations.json"
    file.parent.mkdir()
    file.write_text('{"etcd": [NaN, 7, Infinity, "soon", 3.5], "helm": [-1], "kubernetes": null, "vLLM": [0]}')
    assert [durations.estimate(stage) for stage in ("etcd", "helm", "vLLM")] == [7.0, durations.MEASURED["helm"], 0.0]
    durations.record("etcd", 12.0)
    assert json.loads(file.read_text())["etcd"] == [7.0, 3.5, 12.0]


def test_a_cache_that_cannot_be_written_ends_nothing(home: Path) -> None:
    (home / "cache").write_text("a file where the folder should be")
    durations.record("etcd", 12.0)
    assert durations.estimate("etcd") == durations.MEASURED["etcd"]


def test_every_figure_is_of_a_stage_and_stands_in_the_benchmarks() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "hack").rglob("*.py"))
    stages = {
        *(tools.name for tools in TOOL_SETS),
        *(f"packages of the {role} image" for role in Role),
        *re.findall(r'of="([^"]+)"', sources),
        *re.findall(r'step\("([^"]+)"', sources),
    }
    assert set(durations.MEASURED) <= stages
    rows = re.findall(r"^\| (.+?) \| (\d+) s \|$", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert {name: float(seconds) for name, seconds in rows if name in stages} == durations.MEASURED
