"""Options of the repository's benchmarks."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from benchmarks.commands import positive
from benchmarks.rows import ROOT


@pytest.mark.parametrize("text", ["0", "-2", "x", "", "1.5"])
def test_a_number_below_one_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no whole number of at least 1"):
        positive(text)
    assert positive("12") == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serving_peers", "--rounds", "0"], "--rounds"),
        (["serving_peers", "--policies", "nope"], 'no term "nope"'),
        (["serving_peers", "--front"], "give --vllm-python"),
        (["server", "engine_share", "--clients", "8", "0"], "--clients"),
        (["server", "engine_share", "--rounds", "1"], "the first round only warms up"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(words: list[str], said: str) -> None:
    module, *rest = words
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *rest], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode and said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
