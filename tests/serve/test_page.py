"""The dashboard in a real browser: what it shows of real requests, at the widths of a desk and of a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfold import __version__
from kvfold.serve.cache.usage import Price
from tests.serve.asking import SECRET, TENANTS, send
from tests.serve.bodies import call
from tests.serve.browser import CHROMIUM, Page, browser
from tests.serve.ops.test_dashboard import NUM_HEADS, NUM_LAYERS
from tests.serve.running import running, tool_model

HELLO: Any = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path) as found:
        yield found


def _is_within(page: Page, width: int) -> bool:
    page.resize(width)
    return bool(page.eval(f"document.documentElement.scrollWidth <= {width}"))


def test_it_asks_for_a_key_and_shows_a_request(page: Page) -> None:
    with running(tool_model(), "keydiff + 4x", tenants=TENANTS, key="key-a", price=Price(3.0, 15.0)) as server:
        reply = send(server)
        page.resize(1280)
        page.open(server.url)
        page.until("!document.getElementById('login').hidden")
        assert page.eval("document.getElementById('board').hidden")
        assert len(page.faults) == 1, "the browser itself notes the answer without a key"
        assert "401" in page.faults[0]
        page.eval("document.getElementById('key').value = 'key-a'")
        page.eval("document.querySelector('#login button').click()")
        page.until("document.querySelectorAll('#requests tbody tr').length === 1")
        page.until("document.querySelectorAll('#map .cell').length > 0")
        assert page.eval("document.querySelectorAll('#map .cell').length") == NUM_LAYERS * NUM_HEADS
        row = page.text("#requests tbody")
        assert page.text("#tenant") == "tenant red"
        assert str(reply.usage.cache_creation_input_tokens + reply.usage.input_tokens) in row
        assert "stored now" in row
        assert "length limit" in row
        assert page.text("h1") == f"kvfold {__version__}"
        assert page.text("#timed") == "of the latest 1 reply"
        send(server)
        page.until("document.getElementById('hit-rate').innerText === '50 %'")
        assert SECRET[:7] not in page.text()
        assert _is_within(page, 390)
        assert _is_within(page, 1280)
        assert len(page.faults) == 1, page.faults


@pytest.mark.slow
def test_a_wrong_key_is_told_and_asked_for_again(page: Page) -> None:
    with running(tool_model(), tenants=TENANTS, key="key-a") as server:
        page.open(server.url)
        for key in ("wrong", "key-b"):
            page.until("!document.getElementById('login').hidden")
            page.eval(f"document.getElementById('key').value = '{key}'")
            page.eval("document.querySelector('#login button').click()")
            if key == "wrong":
                page.until("document.getElementById('refused').innerText.includes('not known')")
        page.until("!document.getElementById('board').hidden")
        assert page.text("#none").startswith("None yet")


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 700, 820, 999, 1000, 1280])
def test_no_width_scrolls_sideways(page: Page, width: int) -> None:
    with running(tool_model(), "keydiff + ada + 4x") as server:
        for _ in range(3):
            send(server)
        page.resize(width)
        page.open(server.url)
        page.until("document.querySelectorAll('#map .cell').length > 0")
        assert _is_within(page, width)
        assert page.faults == []


@pytest.mark.slow
def test_a_server_that_is_gone_is_told(page: Page) -> None:
    with running(tool_model()) as server:
        page.open(server.url)
        page.until("document.getElementById('state').className === 'live'")
    page.until("document.getElementById('state').className === 'lost'")


def test_charts_reasons_and_the_compressed_prompt(page: Page) -> None:
    with running(tool_model(), "keydiff + ada + 4x") as server:
        send(server)
        server.openai.chat.completions.create(model="tiny", max_tokens=3, messages=[{"role": "user", "content": "hi"}])
        hostile = "<img src=x onerror=alert(1)>"
        assert call(server, "/v1/chat/completions", {"model": hostile, "messages": []}).status == 400
        assert call(server, "/v1/messages", {"model": hostile, "max_tokens": 1, "messages": HELLO}).status == 404
        page.resize(1400)
        page.open(server.url)
        page.until("document.querySelectorAll('#map .cell').length > 0")
        rows = page.eval("[...document.querySelectorAll('#requests tbody tr')].map((row) => row.innerText)")
        assert hostile in rows[0]
        assert "messages: at least one is required" in rows[1]
        assert "100 %" in rows[2]
        assert page.eval("document.querySelectorAll('img').length") == 0
        assert "400 tokens" in page.text("#map-about"), "the newest is too short; the one before is shown"
        page.eval("document.querySelectorAll('#requests button')[2].click()")
        page.until("document.getElementById('map').hidden")
        assert "too short to be compressed" in page.text("#map-about")
        assert page.eval("document.querySelector('.figures thead').innerText.trim().split(/\\s+/)") == [
            "median",
            "slowest",
        ]
        assert page.text("#speed-chart").startswith("Generated tokens per second")
        assert page.eval("document.querySelectorAll('figure .line').length") >= 3
        assert page.faults == []


def test_a_phone_shows_the_latest_requests_and_the_others_on_demand(page: Page) -> None:
    with running(tool_model()) as server:
        for _ in range(7):
            call(server, "/v1/messages", {"model": "tiny"})
        page.resize(390)
        page.open(server.url)
        page.until("document.querySelectorAll('#requests tbody tr').length === 5")
        assert page.text("#more") == "Show all 7"
        page.eval("document.getElementById('more').click()")
        page.until("document.querySelectorAll('#requests tbody tr').length === 7")
        assert _is_within(page, 390)
