# SPDX-License-Identifier: Apache-2.0
"""The page over HTTP: what anybody gets, what needs the token, what a browser may do with it, and how large it is."""

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from starlette.types import Message

from poc_gateway.query.web.feed import Feed, Viewers
from poc_gateway.query.web.overview import Look, sections
from poc_gateway.query.web.routes import FILES, OPEN_PAGES
from poc_operator.apis.v1alpha1.round import PoCRound
from poc_operator.credentials import GATEWAY_TOKEN_HEADER
from tests.support.builders.secrets import OPERATOR_TOKEN, TOKEN
from tests.support.builders.web_page import a_round

KIB = 1024


def client(app: FastAPI) -> AsyncClient:
    return AsyncClient(transport=ASGITransport(app), base_url="http://gateway")


async def test_the_files_need_no_token_and_no_other_origin(app: FastAPI) -> None:
    async with client(app) as browser:
        for path in OPEN_PAGES - {"/web"}:
            answer = await browser.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["Content-Security-Policy"]
            assert {"default-src 'none'", "script-src 'self'", "style-src 'self'"} <= set(policy.split("; "))
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            for secret in (TOKEN, OPERATOR_TOKEN):
                assert secret not in answer.text
        answer = await browser.get("/web")
        # Relative: the prefix is known to the browser alone.
        assert (answer.status_code, answer.headers["Location"]) == (307, "web/")
        assert (await browser.get("/web/feed.py")).status_code == 401
        assert (await browser.post("/web/")).status_code == 401


def test_no_address_is_absolute_and_nothing_stands_inline() -> None:
    page = FILES["index.html"].decode()
    addresses = re.findall(r'(?:href|src)="([^"#]*)"', page)
    assert set(addresses) - {""} <= set(FILES)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]* src=)", page)
    for name, content in FILES.items():
        text = content.decode()
        if name.endswith(".js"):
            assert set(re.findall(r'from "\./([^"]*)"', text)) <= set(FILES), name
            assert "innerHTML" not in text
            assert not re.search(r"""["'`]/(?!/)""", text.replace("`/${", "")), name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name


async def ask_for_events(app: FastAPI, *, headers: dict[str, str], query: str = "") -> tuple[int, dict[str, str]]:
    """Ask for the stream and leave when its first bytes come; return status and headers."""
    told: dict[str, Any] = {}
    begun = asyncio.Event()

    async def receive() -> Message:
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            told.update(message)
        elif message.get("body"):
            begun.set()

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": "GET",
        "path": "/web/events",
        "query_string": query.encode(),
        "headers": raw,
        "client": ("192.0.2.1", 1),
        "server": ("127.0.0.1", 80),
    }
    async with asyncio.timeout(30):
        await app(scope, receive, send)
    return told["status"], {name.decode(): value.decode() for name, value in told["headers"]}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({GATEWAY_TOKEN_HEADER: "other"}, 401),
        ({"Authorization": f"Bearer {OPERATOR_TOKEN}"}, 401),
        ({GATEWAY_TOKEN_HEADER: TOKEN}, 200),
        ({"Authorization": f"Bearer {TOKEN}"}, 200),
    ],
)
async def test_the_stream_needs_the_token_of_people(app: FastAPI, headers: dict[str, str], status: int) -> None:
    found, answered = await ask_for_events(app, headers=headers)
    assert found == status
    if status == 200:
        assert answered["content-type"].startswith("text/event-stream")
        assert (answered["cache-control"], answered["x-accel-buffering"]) == ("no-store", "no")


async def test_a_token_in_the_address_is_none(app: FastAPI) -> None:
    status, _ = await ask_for_events(app, headers={}, query=f"token={TOKEN}&{GATEWAY_TOKEN_HEADER}={TOKEN}")
    assert status == 401


async def test_one_viewer_too_many_is_told_so(app: FastAPI, feed: Feed, viewers: Viewers) -> None:
    held = [feed.stream(None) for _ in range(viewers.most)]
    for stream in held:
        await anext(stream)
    async with client(app) as browser:
        refused = await browser.get("/web/events", headers={GATEWAY_TOKEN_HEADER: TOKEN})
    assert (refused.status_code, refused.json()["reason"]) == (503, "TooManyViewers")
    assert "POC_GATEWAY_VIEWERS" in refused.json()["detail"]
    assert int(refused.headers["Retry-After"]) > 0
    for stream in held:
        await stream.aclose()
    assert (await ask_for_events(app, headers={GATEWAY_TOKEN_HEADER: TOKEN}))[0] == 200


def test_the_page_and_a_thousand_slots_are_small() -> None:
    """The whole payload until 1 000 slots are on the screen."""
    round_ = PoCRound.parse(a_round(slots=1_000))
    told = sections(Look(now=round_.metadata.creation_timestamp, rounds=[round_]), {})
    assert len(told["slots/round-41-uid"]) == 1_000
    files, message = sum(map(len, FILES.values())), len(json.dumps(told, separators=(",", ":")))
    logging.getLogger(__name__).info("files %d KiB, snapshot of 1 000 slots %d KiB", files // KIB, message // KIB)
    assert files + message < 300 * KIB


def test_of_many_rounds_those_that_are_not_over_are_shown_with_their_slots() -> None:
    rounds = [PoCRound.parse(a_round(f"old-{number}", state="Complete", slots=200)) for number in range(50)]
    rounds.append(PoCRound.parse(a_round("now", slots=1_000)))
    told = sections(Look(now=rounds[0].metadata.creation_timestamp, rounds=rounds), {})
    assert (told["rounds"][0]["name"], len(told["rounds"]), told["gateway"]["rounds_left_out"]) == ("now", 40, 11)
    rows = {name: len(value) for name, value in told.items() if name.startswith("slots/")}
    assert rows["slots/now-uid"] == 1_000
    assert sum(rows.values()) <= 4_000
