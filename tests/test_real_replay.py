"""A real model: what the repetition of a text keeps at an eighth of the slots, nobody knowing the question."""

from __future__ import annotations

import pytest

from kvfold.bench.needle import Needles
from kvfold.bench.rows import Facts
from kvfold.bench.sweep import Job, Sweep
from kvfold.models.loader import Model
from tests.test_real_models import load

pytestmark = pytest.mark.model
FACTS = Facts("smollm2-135m", 800, 0, "own prose", "float32", "cpu", "", "", "")


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return load("smollm2-135m", dtype="float32", device="cpu")


def test_a_needle_is_kept_without_the_question(smollm2: Model) -> None:
    """Scores of the repetition with a budget over all heads keep a number of seven digits; the same scores, shared
    evenly by heads, and those of the end of the prompt lose it."""
    keep, lose = ("kvzip + global", "kvzip_plus + global"), ("kvzip", "snapkv", "snapkv + global")
    jobs = [Job(policy, "8x", "unknown") for policy in (*keep, *lose)]
    needles = Needles(smollm2.tokenizer, 800)
    rows = Sweep(smollm2, FACTS, jobs).run(needles.prompt(0), jobs)
    assert {row.policy for row in rows if row.score == 1.0} == set(keep)
