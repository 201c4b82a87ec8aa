# SPDX-License-Identifier: Apache-2.0
"""A gateway with something to show, and a browser to look at its page: for tests, and for the pictures of the docs."""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from poc_gateway.store.database import Database
from tests.simulation.gateway_process import GatewayProcess, gateway
from tests.support.builders.secrets import ENVIRONMENT, TOKEN
from tests.support.builders.web_page import a_fleet, a_round, condition, fill, trouble, write

#: Debian's; Playwright's own browser would have to be downloaded.
CHROMIUM = "chromium"


@dataclass(frozen=True)
class Shown:
    """A gateway whose page is looked at; ``objects`` is the file of what the cluster has."""

    gateway: GatewayProcess
    folder: Path

    @property
    def objects(self) -> Path:
        return self.folder / "objects.json"

    @property
    def page(self) -> str:
        return f"{self.gateway.url}/web/"


def over() -> dict[str, Any]:
    """A round that is over, and has lost a slot."""
    lost = condition("Degraded", "True", "SlotsFailed", "1 slot was given up: pod glm-3 crashed 4 times")
    return a_round("round-40", state="Complete", delivered=300, conditions=[lost], degraded="SlotsFailed")


@contextmanager
def shown(folder: Path, *bodies: dict[str, Any], results: int = 7_000) -> Iterator[Shown]:
    """Run a gateway in front of these objects; the first is a round with so many results."""
    write(folder / "objects.json", *bodies)
    database = Database.open(_url(folder))

    async def seed() -> None:
        known = await fill(database, bodies[0], results)
        await trouble(database, known)

    with ThreadPoolExecutor(1) as thread:  # this one has Playwright's event loop
        thread.submit(lambda: asyncio.run(seed())).result()
    database.close()
    with gateway(_url(folder), folder / "objects.json", folder / "log", ENVIRONMENT) as running:
        yield Shown(running, folder)


def objects() -> Sequence[dict[str, Any]]:
    """What most tests look at."""
    return a_round(), over(), a_fleet()


@contextmanager
def restarted(before: Shown) -> Iterator[GatewayProcess]:
    """Run another gateway at the same address, when the first has ended."""
    port = before.gateway.url.rpartition(":")[2]
    settings = {**ENVIRONMENT, "POC_GATEWAY_PORT": port}
    with gateway(_url(before.folder), before.objects, before.folder / "log", settings, wait=False) as running:
        yield running


def _url(folder: Path) -> str:
    return f"sqlite:///{folder}/gateway.db"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser. RuntimeError if it is not installed."""
    path = shutil.which(CHROMIUM)
    if path is None:
        raise RuntimeError("Chromium is missing: install the Debian package chromium (make test-unit does)")
    with sync_playwright() as playwright:
        # Without its sandbox, which wants more than a container has: it sees our own page alone.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def sign_in(page: Page, address: str, token: str = TOKEN) -> None:
    """Open the page and give it the token, with the keyboard; return when rounds are shown."""
    page.goto(address)
    page.locator("#token").wait_for()
    page.keyboard.type(token)
    page.keyboard.press("Enter")
    page.locator("#rounds tbody tr").first.wait_for()
