# SPDX-License-Identifier: Apache-2.0
"""python -m hack.screenshots: take the docs' pictures of the gateway's web page, in front of a simulated cluster.

It needs the developers' environment and the Debian package chromium: ``make screenshots`` has both.
"""

import argparse
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Browser

from hack.images.site import ROOT
from hack.toolchain.common import UserError, main
from tests.support.builders.deliveries import JSON
from tests.support.builders.secrets import a_grant, pod_headers
from tests.support.builders.stored import distance
from tests.support.builders.web_page import BLOCK, a_fleet, a_round, write
from tests.support.servers.web_page import Shown, chromium, over, shown, sign_in

FOLDER = ROOT / "docs" / "images"
#: Each picture: its scheme, and its width and height in pixels.
PICTURES = {
    "web-page-light.webp": ("light", 1280, 1000),
    "web-page-dark.webp": ("dark", 1280, 1000),
    "web-page-round.webp": ("light", 1280, 900),
}
MOST_BYTES = 150 * 1024
#: So long pods deliver before the pictures are taken, so that the curve has a few points.
SECONDS = 95
_SLOTS, _BATCH, _PAUSE = 7, 40, 0.5


def take() -> None:
    """Take all pictures. UserError if one is too large for the docs."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bodies = (a_round(slots=_SLOTS), over(), a_fleet())
        with shown(Path(folder), *bodies, results=700) as site, _delivering(site), chromium() as browser:
            time.sleep(SECONDS)
            for name, (scheme, width, height) in PICTURES.items():
                _take(browser, site, name, scheme, (width, height))
    for name in PICTURES:
        size = (FOLDER / name).stat().st_size
        print(f"{name}: {size // 1024} KiB")
        if size > MOST_BYTES:
            raise UserError(f"{name} has {size} bytes, more than {MOST_BYTES}: make PICTURES smaller")


def _take(browser: Browser, site: Shown, name: str, scheme: str, size: tuple[int, int]) -> None:
    page = browser.new_page(color_scheme=scheme, viewport={"width": size[0], "height": size[1]})  # type: ignore[arg-type]
    sign_in(page, site.page)
    page.locator("#rate-chart svg").wait_for()
    if "round" in name:
        page.locator('button[data-uid="round-41-uid"]').click()
        page.locator("#histogram svg").wait_for()
        page.locator("#detail").evaluate("(detail) => detail.scrollIntoView()")
    page.evaluate("document.activeElement.blur()")
    # WebP, which Playwright itself does not write, has a third of the bytes of PNG.
    taken = page.context.new_cdp_session(page).send("Page.captureScreenshot", {"format": "webp", "quality": 80})
    (FOLDER / name).write_bytes(b64decode(taken["data"]))
    page.close()


@contextmanager
def _delivering(site: Shown) -> Iterator[None]:
    """Deliver for all slots as pods do, faster and slower, until the block ends."""
    ended = threading.Event()
    thread = threading.Thread(target=_deliver, args=(site, ended))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _deliver(site: Shown, ended: threading.Event) -> None:
    # The round has 100 results of each slot already.
    done, turn = 100, 0
    with httpx.Client(base_url=site.gateway.url) as client:
        while not ended.wait(_PAUSE):
            turn += 1
            batch = _BATCH + 20 * (turn // 25 % 3)
            for slot in range(_SLOTS):
                _send(client, slot, range(slot + done * _SLOTS, slot + (done + batch) * _SLOTS, _SLOTS))
            done += batch
            write(site.objects, a_round(slots=_SLOTS, delivered=done), over(), a_fleet())


def _send(client: httpx.Client, slot: int, nonces: range) -> None:
    pod = f"glm-{slot}"
    grant = a_grant("round-41-uid", slot, pod, start=0, rate=100_000)
    # Of vectors in many dimensions most are far away.
    target = BLOCK["r_target"]
    found = [target * (distance(nonce) / target) ** 0.2 for nonce in nonces]
    body = {**BLOCK, "node_id": slot, "nonces": list(nonces), "dist": found}
    path = "/callbacks/poc/round-41/round-41-uid/generated"
    client.post(path, json=body, headers={**pod_headers(grant), **JSON}).raise_for_status()


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m hack.screenshots", description=__doc__).parse_args()
    main(take)
