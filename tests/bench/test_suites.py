"""Suites name policies that there are, once each, and leave no method of the registry out."""

from __future__ import annotations

import pytest

from kvfold.bench.byte_matching import needs_size
from kvfold.bench.size_cache import cells
from kvfold.bench.suites import SUITES, Suite
from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.policy.registry import term_of, terms
from tests.engine.runs import make_runner
from tests.tiny import prompt

MEASURED = {"profile", "palu"}  # they name a file of the model's own
ELSEWHERE = {"when", "protect", "shorten", "selector", "units"}  # not compared by a prompt that is compressed once

METHODS = SUITES["methods"]


def _parsed(suite: Suite) -> list[Policy]:
    found = {cell.policy: cell.as_written for cell in cells(suite.policies(), suite.memories)}
    return [Policy.parse(policy if as_written else f"{policy} + 1x") for policy, as_written in found.items()]


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_policies_are_valid_and_differ(suite: Suite) -> None:
    assert len({policy.fingerprint for policy in _parsed(suite)}) == len(suite.policies()) + 1  # and the full cache


def test_methods_leave_no_term_out() -> None:
    used = {term_of(variant).name for policy in _parsed(METHODS) for variant in policy.variants}
    assert {term.name for term in terms() if term.axis not in ELSEWHERE} - used == MEASURED


def test_methods_run_in_their_published_forms() -> None:
    """Recent slots, windows, budgets and readers as papers or their authors' code have them."""
    published = {
        "h2o + protect(sinks=0, recent=50%)",
        "scissorhands + protect(sinks=0, recent=10)",
        "a2sf + protect(sinks=0, recent=16)",
        "nacl + protect(recent=5%)",
        "fastgen + adaptive(loss=0.999, window=none) + protect(none)",
        "lava_score + lava",
        "snapkv(window=8, kernel=7, pool=max) + pyramid",
    }
    assert published <= set(METHODS.policies())
    assert not {"h2o", "scissorhands", "a2sf", "nacl", "h2o + d2o"} & set(METHODS.policies())
    assert any("rocket(tokens=512, reader=pages" in policy for policy in METHODS.policies())


def test_every_method_runs_on_a_small_model(model: Model) -> None:
    """One prompt and a step of each, in half of the slots where it needs a size."""
    runner, ids = make_runner(model), prompt(150)
    trained, deeper = ("learned",), ("minicache(layers=14::2)",)  # for other models
    policies = [policy for policy in METHODS.policies() if policy not in deeper and not policy.startswith(trained)]
    sized = [f"{policy} + 2x" if needs_size(policy) else policy for policy in policies]
    for first in range(0, len(sized), 24):  # as many as the arena holds
        sequences = [runner.new_sequence(Policy.parse(policy)) for policy in sized[first : first + 24]]
        try:
            logits = runner.prefill_many(sequences, ids)
            requests = [Request(sequence, row, 2) for sequence, row in zip(sequences, logits, strict=True)]
            for _ in generate(runner, requests, model.tokenizer):
                pass
            assert all(len(request.token_ids) == 2 for request in requests)
        finally:
            for sequence in sequences:
                sequence.release()
