# SPDX-License-Identifier: Apache-2.0
"""The README's picture of a terminal in a browser: it plays, in both schemes, unless its reader wants less motion."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from hack.recording import animation
from hack.recording.cast import Cast
from tests.support.servers.web_page import chromium

EVENTS = [(0.0, "first\r\n"), (2.0, "second\r\n"), (5.0, "third\r\n")]
GROUNDS = {"light": "rgb(246, 248, 250)", "dark": "rgb(13, 17, 23)"}


@pytest.fixture
def picture(tmp_path: Path) -> str:
    file = tmp_path / "recording.svg"
    file.write_text(animation.draw(Cast(40, 6, "a test", list(EVENTS))))
    return file.as_uri()


def _shown(page: Page, seconds: float | None = None) -> list[str]:
    """Return the texts within the window, so many seconds after the beginning."""
    found: list[str] = page.evaluate(
        """(seconds) => {
            for (const one of document.getAnimations()) {
                one.pause();
                if (seconds !== null) one.currentTime = 1000 * seconds;
            }
            const frame = document.querySelector(".ground").getBoundingClientRect();
            const inside = (use) => {
                const box = use.getBoundingClientRect();
                return box.left >= frame.left - 1 && box.right <= frame.right + 1;
            };
            return [...document.querySelectorAll("use")].filter(inside)
                .map((use) => document.querySelector(use.getAttribute("href")).textContent);
        }""",
        seconds,
    )
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_plays_its_screens_in_their_time(picture: str, scheme: Any) -> None:  # noqa: ANN401 - a literal
    with chromium() as browser:
        page = browser.new_page(color_scheme=scheme, reduced_motion="no-preference")
        page.goto(picture)
        texts = ["first", "second", "third"]
        assert [_shown(page, seconds) for seconds in (0, 1.9, 2.1, 4.9, 5.1, 10.9)] == [
            texts[:count] for count in (1, 1, 2, 2, 3, 3)
        ]
        ground = page.evaluate("getComputedStyle(document.querySelector('.ground')).fill")
        assert ground == GROUNDS[scheme]


def test_with_less_motion_it_stands_at_its_end(picture: str) -> None:
    with chromium() as browser:
        page = browser.new_page(reduced_motion="reduce")
        page.goto(picture)
        assert page.evaluate("document.getAnimations().length") == 0
        assert _shown(page) == ["first", "second", "third"]
