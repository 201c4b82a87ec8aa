# SPDX-License-Identifier: Apache-2.0
"""What is bound is on every line within, and on none beyond."""

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from vllm_poc.logs import FIELDS, JsonFormatter, PlainFormatter, bind_handlers, bound, fields_of, get_logger

log = logging.getLogger("vllm_poc_test")


class Kept(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    log.addHandler(handler)
    bind_handlers(log)
    yield handler
    log.removeHandler(handler)


def about(kept: Kept) -> list[dict[str, str | int]]:
    return [fields_of(record) for record in kept.records]


def test_fields_add_up_and_end_with_their_block(kept: Kept) -> None:
    with bound(round="r", slot=0):
        log.warning("one")
        with bound(pod="p", slot=2, request=None):
            log.warning("two")
        log.warning("three")
    log.warning("four")
    outer = {"round": "r", "slot": 0}
    assert about(kept) == [outer, {"round": "r", "slot": 2, "pod": "p"}, outer, {}]


def test_they_end_when_the_block_fails(kept: Kept) -> None:
    with pytest.raises(OSError, match="fault"), bound(request="a"):
        raise OSError("fault")
    log.warning("after")
    assert about(kept) == [{}]


async def test_tasks_have_what_was_bound_where_they_began(kept: Kept) -> None:
    async def work(name: str, others: asyncio.Barrier) -> None:
        with bound(pod=name):
            await others.wait()
            log.warning("from %s", name)

    barrier = asyncio.Barrier(2)
    with bound(round="r"):
        tasks = [asyncio.create_task(work(name, barrier)) for name in "ab"]
    log.warning("beside")
    await asyncio.gather(*tasks)
    beside, *rest = about(kept)
    assert beside == {}
    assert sorted(rest, key=str) == [{"round": "r", "pod": "a"}, {"round": "r", "pod": "b"}]


def test_what_a_line_says_of_itself_stays(kept: Kept) -> None:
    with bound(pod="bound"):
        log.warning("x", extra={"pod": "own"})
    assert about(kept) == [{"pod": "own"}]


def test_loggers_of_the_pod_bind_whatever_handler_there_is(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        logger = get_logger("vllm_poc.test")
    assert (logger.name, len(logger.filters)) == ("vllm.vllm_poc.test", 1)
    with bound(request="q"):
        logger.warning("x")
    assert fields_of(caplog.records[0]) == {"request": "q"}


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
def test_json_lines(kept: Kept, level: int) -> None:
    with bound(request="q", pod="p", slot=0, round="r"):
        log.log(level, 'a "%s"\nline', "quoted", exc_info=ValueError("odd"))
    text = JsonFormatter().format(kept.records[0]) if kept.records else "{}"
    line = json.loads(text)
    if level == logging.INFO:  # below the root's level
        assert line == {}
        return
    assert "\n" not in text
    assert line["message"] == 'a "quoted"\nline'
    assert line["severity"] == {logging.WARNING: "warn", logging.ERROR: "error"}[level]
    assert [name for name in line if name in FIELDS] == list(FIELDS)
    assert (line["round"], line["slot"], line["pod"], line["request"]) == ("r", 0, "p", "q")
    assert "ValueError: odd" in line["exc_info"]


def test_plain_lines(kept: Kept) -> None:
    with bound(slot=0, round="r"):
        log.warning("within 100%%: %s", "x")
    log.warning("beyond")
    formatter = PlainFormatter("%(levelname)s: %(message)s")
    assert [formatter.format(record) for record in kept.records] == [
        "WARNING: within 100%: x [round=r slot=0]",
        "WARNING: beyond",
    ]
