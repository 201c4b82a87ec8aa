# SPDX-License-Identifier: Apache-2.0
"""The web page as people use it: with a keyboard, a screen reader, in light and dark, while rounds go on."""

import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.simulation.gateway_process import wait_until_ready
from tests.support.builders.secrets import TOKEN
from tests.support.builders.web_page import a_fleet, a_round, write
from tests.support.servers.prefix_proxy import proxy_of
from tests.support.servers.web_page import Shown, chromium, objects, over, restarted, shown, sign_in

_log = logging.getLogger(__name__)
#: A busy machine may take longer than the 5 s that Playwright gives.
expect.set_options(timeout=20_000)
MARK = "window.isTheSamePage"
#: The longest that 1 000 slots may take. On an idle machine SHOWN_SECONDS=1 asks for the bar itself.
SHOWN_SECONDS = float(os.environ.get("SHOWN_SECONDS", "5"))
#: When the rows are there: a task after the frame in which they were painted.
_SECONDS_UNTIL_ROWS = """
async () => {
  const begun = performance.now();
  document.querySelector('button[data-uid="large-uid"]').click();
  while (document.querySelectorAll("#slots tbody tr").length < 1000) await new Promise(requestAnimationFrame);
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  return (performance.now() - begun) / 1000;
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with shown(tmp_path_factory.mktemp("web"), *objects()) as site:
        yield site


@pytest.fixture
def page(browser: Browser, site: Shown, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A tab of its own that stays with the gateway, and in which nothing fails but questions without a token."""
    write(site.objects, *objects())
    options: dict[str, Any] = getattr(request, "param", {})
    context = browser.new_context(**options)
    page = context.new_page()
    errors, addresses = list[str](), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
    page.on("request", lambda asked: addresses.append(asked.url))
    yield page
    context.close()
    expected = ("401 (Unauthorized)", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")
    assert [error for error in errors if not any(text in error for text in expected)] == []
    assert {address.split("/")[2].split(":")[0] for address in addresses} == {"127.0.0.1"}
    assert not any(TOKEN in address for address in addresses)


def findings(page: Page) -> list[str]:
    """What axe finds that is serious or critical."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in violations
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def test_the_token_is_asked_for_once_and_kept_in_the_tab(page: Page, site: Shown) -> None:
    page.goto(f"{site.gateway.url}/web")
    expect(page.locator("#token")).to_be_focused()
    page.keyboard.type("another")
    page.keyboard.press("Enter")
    expect(page.locator("#token-error")).to_contain_text("does not accept this token")
    expect(page.locator("#content")).to_be_hidden()
    page.keyboard.type(f"{TOKEN},older")
    page.keyboard.press("Enter")
    expect(page.locator("#rounds tbody tr")).to_have_count(2)
    assert page.evaluate("[Object.values(sessionStorage), JSON.stringify(localStorage)]") == [[TOKEN], "{}"]
    page.reload()
    expect(page.locator("#rounds tbody tr")).to_have_count(2)
    page.get_by_role("button", name="Forget the token").click()
    expect(page.locator("#token")).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0


LOOKS = [
    {"color_scheme": "light", "viewport": {"width": 1440, "height": 900}},
    {"color_scheme": "dark", "viewport": {"width": 1440, "height": 900}},
    {"color_scheme": "dark", "viewport": {"width": 390, "height": 800}},
]


#: Draws a histogram of distances as honest pods have them, which lie close together; returns what stands at its edges.
CLOSE_DISTANCES = """async () => {
    const { histogram } = await import(new URL("chart.js", document.querySelector("script[src]").src));
    const drawn = document.createElement("div");
    const edges = Array.from({ length: 21 }, (_, index) => 1.3887 + index * 0.00056);
    histogram(drawn, { quantity: "distance", counts: Array(20).fill(3), edges, above: 0, counted: 60, sampled: false });
    const texts = (selector) => [...drawn.querySelectorAll(selector)].map((one) => one.textContent);
    return [texts("svg text").slice(-5), texts("tbody th")];
}"""


def test_distances_that_lie_close_together_are_told_apart(page: Page, site: Shown) -> None:
    sign_in(page, site.page)
    axis, table = page.evaluate(CLOSE_DISTANCES)
    assert axis == ["1.3887", "1.3915", "1.3943", "1.3971", "1.3999"]
    assert len(set(table)) == 20


@pytest.mark.parametrize("page", LOOKS, indirect=True, ids=["light", "dark", "narrow"])
def test_axe_finds_nothing_serious(page: Page, site: Shown) -> None:
    page.goto(site.page)
    page.locator("#token").wait_for()
    assert findings(page) == []
    sign_in(page, site.page)
    page.locator('button[data-uid="round-41-uid"]').click()
    page.locator("#histogram svg").wait_for()
    for summary in page.locator("#histogram summary").all():
        summary.click()
    assert findings(page) == []
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0, "tables scroll by themselves, and the page does not"


def test_the_switch_goes_before_the_system(page: Page, site: Shown) -> None:
    sign_in(page, site.page)
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.get_by_label("Theme").select_option("dark")
    assert page.evaluate(back) != light
    page.reload()
    page.locator("#rounds tbody tr").first.wait_for()
    assert page.evaluate(back) != light
    assert findings(page) == []


def test_a_keyboard_is_enough(page: Page, site: Shown) -> None:
    sign_in(page, site.page)
    page.reload()
    page.locator("#rounds tbody tr").first.wait_for()
    names = list[str]()
    for _ in range(12):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent.trim()").split("\n")[
                0
            ]
        )
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", names
        if names[-1].startswith("poc/round-41"):
            break
    assert names[0] == "Skip to the content"
    assert names[-1] == "poc/round-41: show slots and results"
    page.keyboard.press("Enter")
    expect(page.locator("#detail-title")).to_be_focused()
    expect(page.locator("#slots tbody tr")).to_have_count(7)
    page.get_by_role("button", name="Close").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#detail")).to_be_hidden()
    expect(page.get_by_role("button", name="poc/round-41")).to_be_focused()


def test_a_screen_reader_finds_its_way(page: Page, site: Shown) -> None:
    sign_in(page, site.page)
    page.locator('button[data-uid="round-41-uid"]').click()
    page.locator("#histogram svg").wait_for()
    for landmark in ("banner", "main", "contentinfo"):
        expect(page.get_by_role(landmark)).to_have_count(1)
    headings = page.get_by_role("heading", level=2).all_text_contents()
    shown_as = ["Now", "Needs attention (4 to act on, 1 to watch)", "Rounds", "Round poc/round-41"]
    assert headings == [*shown_as, "The last hour", "Fleets"]
    assert all(page.locator("table").evaluate_all("tables => tables.map((one) => one.caption.textContent)"))
    expect(page.get_by_role("img", name="The distance of all 7,000 results")).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("Live")
    expired = page.locator("#attention li").filter(has_text="ResultsExpired")
    expect(expired).to_contain_text("What to do:")
    expect(expired.locator("code")).to_have_text("POST /rounds/poc/round-41/ledger/replay?state=expired")
    # Signs and words tell what colours tell.
    expect(page.locator("#attention .mark").first).to_have_text("! Act")
    expect(page.locator("#fleets tbody")).to_contain_text("✕ Failed")
    expect(page.locator("#fleets .fleet p")).to_contain_text("✕ 7 of 8 pods ready")


def test_a_round_goes_on_while_the_page_is_open(page: Page, site: Shown) -> None:
    sign_in(page, site.page)
    page.locator('button[data-uid="round-41-uid"]').click()
    delivered = page.locator("#slots tbody tr").first.locator("td").nth(3)
    expect(delivered).to_have_text("1,000")
    page.evaluate(f"{MARK} = true")
    row = page.locator("#slots tbody tr").first.element_handle()
    write(site.objects, a_round(delivered=1_234, message="all is well"), over(), a_fleet(pods=9))
    expect(delivered).to_have_text("1,234", timeout=10_000)
    expect(page.locator("#detail-message")).to_contain_text("All is well", ignore_case=True)
    expect(page.locator("#fleets tbody tr")).to_have_count(9)
    assert page.evaluate(MARK)
    assert row.is_visible(), "the row is the one that was there"
    write(site.objects, a_round(state="Complete", delivered=1_300), over())
    expect(page.locator("#rounds tbody tr").first.locator("td").first).to_have_text("✓ Complete", timeout=10_000)
    expect(page.locator("#fleets-none")).to_be_visible()


def test_a_thousand_slots_are_shown_soon(page: Page, site: Shown) -> None:
    write(site.objects, a_round("large", slots=1_000), a_fleet())
    sign_in(page, site.page)
    page.locator('button[data-uid="large-uid"]').wait_for(timeout=10_000)
    seconds = page.evaluate(_SECONDS_UNTIL_ROWS)
    _log.info("1 000 slots are shown within %.3f s", seconds)
    assert seconds < SHOWN_SECONDS


def test_it_works_below_the_api_servers_proxy(page: Page, site: Shown) -> None:
    with proxy_of(site.gateway.url) as address:
        sign_in(page, f"{address}/web")
        assert page.url == f"{address}/web/"
        page.locator('button[data-uid="round-41-uid"]').click()
        expect(page.locator("#histogram svg")).to_be_visible()
        expect(page.locator("#conflicts tbody tr")).to_have_count(1)
        page.goto("about:blank")


def test_it_comes_back_after_a_restart(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("restarted")
    with shown(folder, *objects(), results=70) as site:
        page = browser.new_page()
        sign_in(page, site.page)
        page.evaluate(f"{MARK} = true")
        site.gateway.process.send_signal(signal.SIGTERM)
        # An open stream does not hold the end up, for which requests have 20 s.
        assert site.gateway.process.wait(10) == 0
        expect(page.locator("#status")).to_contain_text("Trying again")
        expect(page.locator("#rounds tbody tr")).to_have_count(2)
        write(site.objects, a_round(message="after the restart"), over())
        with restarted(site) as again:
            wait_until_ready(again.process, site.gateway.url)
            expect(page.locator("#status")).to_have_text("Live", timeout=15_000)
            expect(page.locator("#rounds")).to_contain_text("after the restart", timeout=15_000)
            assert page.evaluate(MARK)
            page.close()
