"""A real model: what the repetition of a text keeps in a quarter of the slots, nobody knowing the question."""

from __future__ import annotations

import pytest

from kvfold.bench.answers import answer
from kvfold.bench.batched_eval import EvalJob
from kvfold.bench.prompts import PromptBuilder
from kvfold.bench.workloads import Setting, find
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model

pytestmark = pytest.mark.model
LENGTH = 400


def test_a_needle_is_kept_without_the_question(smollm2: Model) -> None:
    """Scores of the repetition with a budget over all heads keep a number of seven digits; the same scores, shared
    evenly by heads, and those of the end of the prompt lose it."""
    keep, lose = ("kvzip + global", "kvzip_plus + global"), ("kvzip", "snapkv + global")
    needle, prompter = find("needle"), PromptBuilder(smollm2.tokenizer)
    sample = needle.sample(Setting(LENGTH, 0, prompter.count_tokens), "needles_1", 3)
    prompt = prompter.prompt(sample)
    jobs = {EvalJob(prompt, "unknown", f"{policy} + 4x", sample.max_new_tokens): policy for policy in (*keep, *lose)}
    found = answer(Runner(smollm2.hf, smollm2.spec, smollm2.arena), list(jobs))
    replies = {jobs[job]: smollm2.tokenizer.decode(outcome.token_ids) for job, outcome in found.items()}
    assert {policy for policy, reply in replies.items() if needle.score(sample, reply)} == set(keep)
