"""The page in a real browser: no errors, no sideways scrolling on a phone, buttons that switch what they should."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.bench.record import read_run
from kvfold.bench.report import write_report
from tests.bench.report_runs import EXAMPLE, write

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here; install it to look at the page in a browser")
LONG = "snapkv(window=32) + ada + protect(sinks=4, recent=32) + int4"
_BEFORE = "<script>window.wrong = []; addEventListener('error', (event) => wrong.push(event.message));</script>"
_AFTER = """<script>
const press = (selector) => document.querySelector(selector).click();
const shown = (group) => [...document.querySelectorAll(`[data-view="${group}"]`)]
  .filter((view) => view.offsetParent !== null).map((view) => view.dataset.name);
const sound = { width: innerWidth, page: document.documentElement.scrollWidth, before: shown("scope-0") };
press('[data-group="scope-0"] [data-choose="needle"]');
sound.after = shown("scope-0");
sound.pressed = document.querySelector('[data-group="scope-0"] [aria-pressed="true"]').textContent;
const lines = () => [...document.querySelectorAll('[data-view="scope-0"]:not([hidden]) [data-policy="1"]')]
  .filter((line) => line.getBoundingClientRect().width > 0).length;
sound.lines = [lines()];
press('[data-toggle="1"]');
sound.lines.push(lines());
const select = document.querySelector("select[aria-label=mode]");
select.value = "unknown";
select.dispatchEvent(new Event("change"));
sound.heads = [...document.querySelectorAll("article h4")].map((head) => head.textContent);
sound.bold = document.querySelectorAll("article b").length;
sound.models = shown("model");
sound.wrong = wrong;
parent.postMessage(JSON.stringify(sound), "*");
</script>"""
_FRAME = """<!doctype html><body style="margin: 0"><script>
addEventListener("message", (event) => {{ document.body.dataset.sound = event.data; }});
</script><iframe width="{width}" height="900" style="border: 0" src="{name}"></iframe>"""


def _looked_at(page: Path, width: int) -> subprocess.CompletedProcess[str]:
    """In a frame, since windows have a least width."""
    frame = page.with_name("frame.html")
    frame.write_text(_FRAME.format(width=width, name=page.name), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=5000", frame.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def _sound(tmp_path: Path, width: int) -> dict[str, Any]:
    """What the page does when its buttons are pressed; the console must stay silent."""
    written: dict[str, Any] = {"policy": LONG, "answer": "<b>no</b> " + "x" * 400}
    rows = [replace(row, **written) if row.policy == "keydiff" else row for row in read_run(EXAMPLE).rows]
    runs = [write(tmp_path / "run", rows), write(tmp_path / "other", rows, model="other")]
    out = tmp_path / "report.html"
    write_report(runs, out)
    page = out.read_text(encoding="utf-8").replace("<head>", f"<head>{_BEFORE}").replace("</body>", f"{_AFTER}</body>")
    out.write_text(page, encoding="utf-8")
    done = _looked_at(out, width)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'data-sound="([^"]*)"', done.stdout)
    assert found, done.stdout[-2000:]
    sound: dict[str, Any] = json.loads(html.unescape(found[1]))
    return sound


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_works_at_every_width(tmp_path: Path, width: int) -> None:
    sound = _sound(tmp_path, width)
    assert sound["wrong"] == []
    assert sound["width"] == width and sound["page"] <= width
    assert (sound["before"], sound["after"], sound["pressed"]) == (["all workloads"], ["needle"], "needle")
    assert sound["lines"] == [2, 0]  # a panel for each mode, then hidden by the legend
    assert sound["models"] == ["example"]


def test_answers_are_browsed_as_text(tmp_path: Path) -> None:
    sound = _sound(tmp_path, 1280)
    heads = [head for head in sound["heads"] if head.startswith(LONG)]
    assert sum("question unknown" in head for head in heads) >= 6  # the script's; two are those of the other model
    assert sound["bold"] == 0


def test_without_a_script_the_overall_stands_there(tmp_path: Path) -> None:
    """Views are chosen in the markup itself, and buttons that would do nothing are not shown."""
    out = tmp_path / "report.html"
    write_report([EXAMPLE], out)
    found = re.findall(r'<div data-view="scope-0" data-name="([^"]*)"( hidden)?>', out.read_text(encoding="utf-8"))
    assert found == [("all workloads", ""), ("passkey", " hidden"), ("needle", " hidden")]
    assert re.search(r'<div class="buttons" data-group="scope-0"[^>]* hidden>', out.read_text(encoding="utf-8"))
