"""The page in a real browser: no errors, no sideways scrolling on a phone, links and buttons that work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.bench.record import read_run
from kvfold.bench.report import write_report
from tests.bench.report_runs import EXAMPLE, write
from tests.serve.browser import CHROMIUM, Page, browser

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here; install it to look at the page in a browser"
)
LONG = "snapkv(window=32) + ada + protect(sinks=4, recent=32) + int4"
_SHOWN = """(group) => [...document.querySelectorAll(`[data-view="${group}"]`)]
  .filter((view) => view.offsetParent !== null).map((view) => view.dataset.name)"""
_OFF_SCREEN = """[...document.querySelectorAll("td, h1, h2, h3, h4, p, summary, button, figcaption, nav")]
  .filter((each) => each.offsetParent !== null && !each.closest(".scroll:not(:has(.winners))"))
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.textContent)"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two models, with a policy and an answer that are long and hold markup."""
    folder = tmp_path_factory.mktemp("report")
    written: dict[str, Any] = {"policy": LONG, "answer": "<b>no</b> " + "x" * 400}
    rows = [replace(row, **written) if row.policy == "keydiff" else row for row in read_run(EXAMPLE).rows]
    runs = [write(folder / "run", rows), write(folder / "other", rows, model="other")]
    write_report(runs, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def tab(report: Path) -> Iterator[Page]:
    with browser(report.parent / "profile") as page:
        yield page


@pytest.fixture(params=[390, 1400])
def page(tab: Page, report: Path, request: pytest.FixtureRequest) -> Page:
    """Opened anew for every test, at the width of a phone and of a screen."""
    tab.resize(request.param)
    search = f"?{request.node.name}"
    tab.open(report.as_uri() + search)
    tab.until(f"decodeURI(location.search) === {search!r} && document.querySelector('.filters') !== null")
    return tab


def test_nothing_stands_beside_the_screen(page: Page) -> None:
    assert page.eval("document.documentElement.scrollWidth <= innerWidth")
    assert page.eval(_OFF_SCREEN) == []
    assert page.faults == []


def test_contents_lead_to_their_parts(page: Page) -> None:
    links = "[...document.querySelectorAll('nav a')].filter((link) => link.offsetParent !== null)"
    for place in range(page.eval(f"{links}.length")):
        page.eval(f"{links}[{place}].click()")
        at = f"document.querySelector({links}[{place}].hash).getBoundingClientRect()"
        assert page.eval(f"{at}.top >= 0 && {at}.top < innerHeight"), place


def test_the_score_of_the_first_table_can_be_seen(page: Page) -> None:
    """Without scrolling: on a phone its rows are set as cards."""
    assert page.eval("document.querySelector('.winners tbody td:nth-child(4)').innerText").startswith("1")
    right = "document.querySelector('.winners tbody td:nth-child(4)').getBoundingClientRect().right"
    assert 0 < page.eval(right) <= page.eval("innerWidth")


def test_what_is_wider_than_its_frame_says_so_until_it_was_scrolled(page: Page) -> None:
    seen = "[...document.querySelectorAll('.scroll')].filter((area) => area.checkVisibility())"
    wide = f"{seen}.filter((area) => area.scrollWidth > area.clientWidth + 4)"
    signed = f"{seen}.filter((area) => area.parentElement.classList.contains('more'))"
    page.until(f"{wide}.length === {signed}.length")
    if page.eval("innerWidth") == 390:
        assert page.eval(f"{wide}.length") > 0
    page.eval(f"{wide}.forEach((area) => {{ area.scrollLeft = area.scrollWidth; }})")
    page.until(f"{signed}.length === 0")


def test_buttons_choose_views_and_the_legend_hides_lines(page: Page) -> None:
    assert page.eval(f"({_SHOWN})('scope-0')") == ["all workloads"] and page.eval(f"({_SHOWN})('model')") == ["example"]
    page.eval("""document.querySelector('[data-group="scope-0"] [data-choose="needle"]').click()""")
    assert page.eval(f"({_SHOWN})('scope-0')") == ["needle"]
    assert (
        page.eval("""document.querySelector('[data-group="scope-0"] [aria-pressed="true"]').textContent""") == "needle"
    )
    lines = """[...document.querySelectorAll('[data-view="scope-0"]:not([hidden]) [data-policy="1"]')]
      .filter((line) => line.getBoundingClientRect().width > 0).length"""
    assert page.eval(lines) == 4  # a line and a label for each mode
    page.eval("""document.querySelector('[data-toggle="1"]').click()""")
    assert page.eval(lines) == 0


def test_answers_are_browsed_as_text(page: Page) -> None:
    assert page.eval("document.querySelectorAll('article details[open]').length") == 0
    page.eval("""(() => { const select = document.querySelector("select[aria-label=mode]");
      select.value = "unknown"; select.dispatchEvent(new Event("change")); })()""")
    heads = page.eval("[...document.querySelectorAll('.articles')].map((each) => each.innerText)[0]")
    assert heads.count("question unknown") >= 4 and "question known" not in heads and LONG in heads
    page.eval("document.querySelector('article summary').click()")
    assert "<b>no</b>" in page.text("article dl") and page.eval("document.querySelectorAll('article b').length") == 0


def test_every_cell_of_the_heat_map_can_be_read(page: Page) -> None:
    """Contrast of digits and cell is 4.5 or more (WCAG AA), in the light and in the dark."""
    for is_dark in (False, True):
        page.darken(is_dark)
        pairs = page.eval("""[...document.querySelectorAll('.heat td')].filter((cell) => cell.innerText).map((cell) =>
          [getComputedStyle(cell).color, getComputedStyle(cell).backgroundColor])""")
        assert pairs and min(_contrast(*map(_channels, pair)) for pair in pairs) >= 4.5
    page.darken(False)


def _channels(colour: str) -> list[float]:
    """rgb(1, 2, 3) or color(srgb 0.1 0.2 0.3)"""
    found = [float(number) for number in re.findall(r"[\d.]+", colour)[:3]]
    return found if colour.startswith("color(") else [channel / 255 for channel in found]


def _contrast(one: list[float], other: list[float]) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(channels: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_without_a_script_the_overall_stands_there(tmp_path: Path) -> None:
    """Views are chosen in the markup itself, and buttons that would do nothing are not shown."""
    out = tmp_path / "report.html"
    write_report([EXAMPLE], out)
    found = re.findall(r'<div data-view="scope-0" data-name="([^"]*)"( hidden)?>', out.read_text(encoding="utf-8"))
    assert found == [("all workloads", ""), ("passkey", " hidden"), ("needle", " hidden")]
    assert re.search(r'<div class="buttons" data-group="scope-0"[^>]* hidden>', out.read_text(encoding="utf-8"))
