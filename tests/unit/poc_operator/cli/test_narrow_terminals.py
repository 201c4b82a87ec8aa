# SPDX-License-Identifier: Apache-2.0
"""Tables where the terminal is narrow or low: what matters is there whole, and what is left out is told."""

import io
import re
from collections.abc import Iterator, Sequence

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from poc_operator.apis.v1alpha1.fleet import PoCFleet
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.cli import output
from poc_operator.cli.check_commands import table
from poc_operator.cli.loading import LogEnd
from poc_operator.cli.output import Column, Cropped
from poc_operator.cli.overview import Overview, Seen, overview
from poc_operator.cli.overview_tables import tables
from poc_operator.cli.pod_metrics import Chat
from poc_operator.cli.preflight import error, ok
from poc_operator.observed import PodView
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Run

DEGRADED = "SlotsStalled,DeliveriesFailing"
ROUND, PODS = "block-3495233", ("minimax-m2-7-decode-0", "minimax-m2-7-decode-1")


def rendered(what: RenderableType, width: int, height: int = 100) -> str:
    """Return what a terminal of this size shows."""
    written = io.StringIO()
    Console(file=written, force_terminal=True, color_system=None, width=width, height=height).print(what)
    return written.getvalue()


def found(name: str = ROUND, pods: Sequence[str] = PODS, **status: str) -> Overview:
    body = seen.a_round(name, **status)
    for slot, pod in zip(body["status"]["assignments"], pods, strict=True):
        slot["pod"] = pod
    fleet = seen.a_fleet("minimax")
    fleet["status"] |= {"reason": "SelfChecksPending", "message": "waiting for the self-checks of all pods: 1 of 2"}
    chat = {("poc", pod): Chat(held=True, seconds=12.5) for pod in pods}
    return overview(
        Seen(
            now=seen.START,
            fleets=[PoCFleet.parse(fleet)],
            rounds=[PoCRound.parse(body)],
            pods=[PodView.parse(seen.a_pod(pod)) for pod in pods],
            chat=chat,
        )
    )


def _table(text: str, title: str) -> list[list[str]]:
    """Return the cells of a table's lines, of which two spaces part each from the next; a bar is one with its share."""
    lines = text.partition(title)[2].splitlines()[1:]
    end = lines.index("") if "" in lines else len(lines)
    joined = [re.sub(r" +(\d+ %)", r" \1", line.strip()) for line in lines[:end]]
    return [re.split(r" {2,}", line) for line in joined]


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("status", [{}, {"degraded": DEGRADED}, {"state": "Suspended"}])
def test_what_matters_of_rounds_and_slots_is_whole(width: int, status: dict[str, str]) -> None:
    text = rendered(tables(found(**status), everywhere=False), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    heads, row = _table(text, "Rounds")[:2]
    shown = dict(zip(heads, row, strict=True))
    assert {"NAME", "STATE", "PROGRESS", "RATE", "ETA", "DEGRADED"} <= set(shown)
    assert (shown["NAME"], shown["STATE"], shown["RATE"]) == (ROUND, status.get("state", "Running"), "100.0/s")
    assert (shown["PROGRESS"][-4:], shown["ETA"]) == ("40 %", "–" if "state" in status else "6 s")  # noqa: RUF001
    heads, *rows = _table(text, f"Slots of {ROUND}")
    assert {"SLOT", "POD", "STATE", "RATE"} <= set(heads)
    assert [row[heads.index("POD")] for row in rows] == list(PODS)
    assert [row[heads.index("STATE")] for row in rows] == ["Running"] * 2


@pytest.mark.parametrize(
    ("width", "stage"), [(80, "Loading: reading weights 46 %"), (140, "reading weights 46 % (21 of 46 files)")]
)
def test_how_far_a_pod_has_loaded_stays_where_there_is_little_room(width: int, stage: str) -> None:
    log = LogEnd(text="Loading safetensors checkpoint shards:  46% Completed | 21/46 [01:02<01:14]")
    (name,), pods = PODS[:1], [PodView.parse(seen.a_pod(PODS[0], ready=False))]
    fleet = seen.that_loads(name)[f"{seen.FLEETS}/demo"]
    look = Seen(now=seen.START, fleets=[PoCFleet.parse(fleet)], pods=pods, logs={("poc", name): log})
    text = rendered(tables(overview(look), everywhere=False), width)
    assert stage in text
    assert ("of 46 files" in text) == (width > 80)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("reason", ["NoPodReady", "CallbackSecretUnavailable"])
def test_a_pending_round_shows_why(width: int, reason: str) -> None:
    waits = seen.condition("Progressing", "False", reason, "waiting for one of 2 pods to become ready")
    accepted = seen.condition("Accepted", "True", "Accepted", "the spec is valid")
    body = seen.a_round(ROUND, state="Pending", conditions=[accepted, waits], running=0, startTime=None)
    look = overview(Seen(now=seen.START, rounds=[PoCRound.parse(body)]))
    text = rendered(tables(look, everywhere=False), width)
    assert max(map(len, text.splitlines())) <= width
    assert "Pending:" in text
    assert reason in text
    running = overview(
        Seen(now=seen.START, rounds=[PoCRound.parse({**body, "status": {**body["status"], "state": "Running"}})])
    )
    assert [one.reason for one in (*look.rounds, *running.rounds)] == [reason, ""]


def test_columns_that_matter_less_go_first() -> None:
    def heads(width: int, title: str) -> set[str]:
        return set(_table(rendered(tables(found(), everywhere=False), width), title)[0])

    assert not heads(80, "Rounds") & {"CHECKED", "VALID"}
    assert "BACKLOG" not in heads(80, "Slots of")
    assert {"AGE", "SLOTS"} <= heads(100, "Rounds")
    assert {"CHECKED", "VALID", "AGE", "HELD BY CHAT"} <= heads(160, "Rounds")


def test_a_column_that_says_nothing_goes_before_one_that_matters_less() -> None:
    shown = output.table("", [Column("A"), Column("EMPTY", rank=1), Column("B", rank=2)], [("a" * 10, "–", "b" * 6)])  # noqa: RUF001
    assert rendered(shown, 20).split() == ["A", "B", "a" * 10, "b" * 6]


def test_a_name_that_is_too_long_goes_on_below() -> None:
    name = "a-round-whose-name-is-as-long-as-kubernetes-lets-it-be-for-a-label"
    text = rendered(tables(found(name, [f"{name}-0", f"{name}-1"], degraded=DEGRADED), everywhere=False), 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "100.0/s" in text


def test_a_pipe_gets_everything(run: Run) -> None:
    done = run("status")
    for head in ("CHECKED", "VALID", "AGE", "BACKLOG", "DELIVERED, OF THE FASTEST", "KUBERNETES NODE", "UP-TO-DATE"):
        assert head in done.out, head
    name = "n" * 250
    assert name in _piped(output.table("", [Column("NAME"), Column("MESSAGE", rank=1)], [(name, "m " * 200)]))
    assert max(map(len, done.out.splitlines())) < 200, "no line is filled up with spaces"


def _piped(what: RenderableType) -> str:
    console = output.console()
    assert not console.is_terminal
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_a_remedy_stands_below_its_finding_and_breaks_no_word() -> None:
    command = "kubectl -n poc-system describe pods -l app.kubernetes.io/name=vllm-poc-operator"
    text = rendered(table([ok("API server", "it answers"), error("operator", "it does not run", command)]), 80)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[1:3] == ["OK       API server: it answers", "ERROR    operator: it does not run"]
    assert lines[3].startswith("         What to do: kubectl -n poc-system")
    assert set(command.split()) <= set(text.split())


def test_rows_that_do_not_fit_are_counted() -> None:
    rows = Text("\n".join(f"row {number}" for number in range(20)))
    shown = rendered(Cropped(rows), 80, height=8).splitlines()
    assert shown == [*(f"row {number}" for number in range(7)), "… and 13 more rows below"]
    assert rendered(Cropped(rows), 80, height=20).splitlines()[-1] == "row 19"


def test_a_live_view_counts_the_rows_that_do_not_fit_and_ends_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, color_system=None, width=80, height=5)
    monkeypatch.setattr(output, "console", lambda: terminal)
    seen_at_first: list[str] = []

    def looks() -> Iterator[int]:
        yield 1
        seen_at_first.append(written.getvalue())

    assert output.follow(looks(), lambda _: Text("\n".join(f"row {number}" for number in range(9)))) == 1
    assert ("… and 5 more rows below" in seen_at_first[0], "row 8" in seen_at_first[0]) == (True, False)
    assert "row 8" in written.getvalue()
