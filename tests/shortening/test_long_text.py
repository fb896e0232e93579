"""Long texts: memory grows with the text and not with its square, progress is told, and threads change nothing."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvfold.shortening.shorten import shorten_text
from kvfold.shortening.text import plan_of
from tests.shortening.texts import long_text

ROOT = Path(__file__).parents[2]
QUESTION = "Who mended the copper kettle?"
SELECTORS = ("graph", "rank", "keyphrases", "head", "tail", "ends", "shuffle")
CHUNKERS = ("sentences", "passages", "fixed(100)", "semantic", "late")


def digest() -> str:
    """What all selectors and chunkers keep of a text whose matrices are large enough for several threads."""
    text, found = long_text(60_000), hashlib.sha256()
    for by in SELECTORS:
        for units in CHUNKERS:
            spans = shorten_text(text, plan_of(by, "5x", units=units, embedder="tfidf"), question=QUESTION).spans
            found.update(repr((by, units, spans)).encode())
    return found.hexdigest()


def measure(num_chars: int) -> dict[str, Any]:
    """Bytes that shortening adds to the process at its peak, and what it reports."""
    text, plan, reports = long_text(num_chars), plan_of("graph", "4x", "none", embedder="tfidf"), list[Any]()
    before = _peak_bytes()
    found = shorten_text(text, plan, progress=lambda *report: reports.append(report))
    return {"bytes": _peak_bytes() - before, "reports": reports, "share": found.num_tokens / found.num_original_tokens}


def _peak_bytes() -> int:
    if sys.platform == "linux":  # where ru_maxrss begins with that of the process that started this one
        return int(Path("/proc/self/status").read_text(encoding="utf-8").split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_process(call: str, **variables: str) -> Any:
    """What a function of this file returns in a process of its own."""
    program = f"import json\nfrom tests.shortening.test_long_text import *\nprint(json.dumps({call}))"
    command, found = [sys.executable, "-c", program], os.environ | variables
    done = subprocess.run(command, cwd=ROOT, env=found, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_threads_and_seeds_of_a_process_change_nothing() -> None:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED")
    one, two = (in_process("digest()", **dict.fromkeys(names, number)) for number in "12")
    assert one == two


def test_memory_grows_with_the_text_and_progress_reaches_its_total() -> None:
    half, whole = (in_process(f"measure({num_chars})") for num_chars in (2_500_000, 5_000_000))
    assert whole["bytes"] < 2.2 * half["bytes"] < 2.2 * 100 * 2_500_000
    for found in (half, whole):
        reports = found["reports"]
        assert reports == sorted(reports) and reports[-1][0] == reports[-1][1] == reports[0][1]
        assert 0.249 < found["share"] <= 0.2501
    steps = len(half["reports"]), len(whole["reports"])
    assert 1.9 < steps[1] / steps[0] < 2.1  # segments that are compared within themselves


@pytest.mark.parametrize("by", ("graph", "rank", "keyphrases"))
def test_progress_is_told_in_steps(by: str) -> None:
    text, reports = "".join(f"- Lamp {number} is lit at dusk.\n" for number in range(2200)), list[tuple[int, int]]()
    plan = plan_of(by, "4x", "none", "sentences", embedder="tfidf")
    shorten_text(text, plan, question=QUESTION, progress=lambda *report: reports.append(report))
    assert len(reports) > 2 and reports == sorted(reports) and reports[-1] == (2200, 2200)
