"""The benchmark of labels on a near-zero-size model: caches that hold less let more windows run at once."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.labels import ONE_PASS, rows, source_text
from kvfold.errors import InputError
from tests import tiny


def arguments(text: Path, *arms: str) -> argparse.Namespace:
    sizes = {"window": 420, "context": 400, "windows": 6, "full_contexts": 2, "batch": 64, "topk": 5}
    return argparse.Namespace(text=text, arms=list(arms), seconds=None, **sizes)


def test_arms_label_the_same_tokens_in_one_arena(tmp_path: Path) -> None:
    text = tmp_path / "rows.jsonl"
    text.write_text("\n".join(f'{{"context": "{"sea and ship " * 12}{number}"}}' for number in range(9)))
    one_pass, full, small = rows(tiny.ready("llama"), arguments(text, ONE_PASS, "full", "streaming + 5x"))
    assert one_pass["labels"] == full["labels"] == small["labels"] == 120
    assert (one_pass["cache_bytes"], full["held"]) == (0, 2) and small["held"] > 2
    assert small["cache_bytes"] < full["cache_bytes"]
    assert full["kl_nats"] < 1e-6 < small["kl_nats"] and full["agreement"] == 1


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a short one")
    assert source_text(text) == "a short one"
    with pytest.raises(InputError, match="no token behind a context of 400"):
        list(rows(tiny.ready("llama"), arguments(text)))
