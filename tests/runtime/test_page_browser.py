"""Does the page work in a browser? A chat streams, its receipt is shown, and what was restored from where.

Headless Chromium, playwright's own (`make browser`) or the system's; without one these tests skip.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.http_application import running
from tests.runtime.http_client import Client
from tests.shared_server import ADMIN_KEY

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
LONG = "once upon a time there was a river that nobody had ever crossed and so they told of it " * 2


@pytest.fixture(scope="module")
def keyed() -> Iterator[Client]:
    """An application that wants a key and has no model."""
    with running(keys=("secret",)) as client:
        yield client


@pytest.fixture(scope="module")
def browser(keyed: Client) -> Iterator[Any]:
    """Begun after the application: playwright keeps this thread's event loop running."""
    with playwright.sync_playwright() as running_playwright:
        chromium = running_playwright.chromium
        own = Path(chromium.executable_path).exists()
        found = None if own else shutil.which("chromium") or shutil.which("google-chrome")
        if not (own or found):
            pytest.skip("no Chromium: run `make browser`")
        browser = chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    page.close()
    assert not problems


def say(page: Any, text: str, count: int) -> Any:
    """The receipt of the answer, the `count`-th one on the page."""
    page.fill("#prompt", text)
    page.click("#send")
    receipt = page.locator(".receipt").nth(count)
    receipt.wait_for(timeout=60_000)
    return receipt


def test_a_chat_streams_and_its_receipt_tells_of_the_restore(server: Client, page: Any) -> None:
    page.goto(server.url)
    page.wait_for_selector("#status:has-text('ready')")
    assert page.text_content("#model") == "tiny"
    page.fill("#max-tokens", "12")
    first = say(page, f"{LONG} A", 0)
    assert first.get_attribute("data-restored") == "0" and "generated 12" in first.text_content()
    assert page.locator(".message.assistant").first.text_content()
    second = say(page, "And then?", 1)
    assert int(second.get_attribute("data-restored")) >= 64
    assert second.get_attribute("data-tier") == "device" and second.locator(".bar .device").count() == 1
    # What the device holds goes to the host; the next turn comes back from there.
    admin = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    body = {"tiers": ["device"], "demote": True}
    assert json.loads(server.request("POST", "/admin/cache/flush", body, admin)[2])["left"] == 0
    third = say(page, "And after that?", 2)
    assert third.get_attribute("data-tier") == "host" and third.locator(".bar .host").count() == 1
    assert "from host" in third.text_content()


def test_memory_and_conversations_are_drawn(server: Client, page: Any) -> None:
    server.post("/v1/completions", {"prompt": [9] * 200, "max_tokens": 2, "cache_salt": "drawn"})
    page.goto(server.url)
    page.wait_for_selector("#memory-pages .bar .entries")
    assert "of" in page.text_content("#memory-host")
    assert page.locator("#tree .branch").count() > 0 and page.locator("#tree .tick").count() > 0
    assert page.locator("#cards .card svg path").count() == 6
    assert "%" in page.text_content("#card-hit-share b")


def test_a_phone_needs_no_sideways_scrolling_and_both_schemes_differ(server: Client, browser: Any) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
        page.goto(server.url)
        page.wait_for_selector("#tree .branch, #tree .note")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()
    assert colours[0] != colours[1]


def test_with_a_key(keyed: Client, page: Any) -> None:
    page.goto(keyed.url)
    page.wait_for_selector("#status.bad:has-text('a key is needed')")
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    # The key is taken; this server has no model, and says so.
    page.wait_for_selector("#status.bad:has-text('HTTP 503')")
