"""Every score under every budget: the size is spent, or bounds what is kept, in shared and in single prefills."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.budget.profile import HeadProfile
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.policy.registry import terms
from tests.engine.runs import kept, make_runner, make_sequence, scorers
from tests.tiny import prompt

Policy.parse("full")  # loads the variants
BUDGETS = [term.name for term in terms("budget")]
LENGTH, OPEN_LEN = 150, 8
SMALL = "protect(sinks=2, recent=8)"


@pytest.fixture
def profile(model: Model, tmp_path: Path) -> Path:
    path = tmp_path / "heads.json"
    num_heads = model.spec.layers[0].num_kv_heads
    needs = tuple(
        tuple(0.1 * (1 + layer + head) for head in range(num_heads)) for layer in range(model.spec.num_layers)
    )
    HeadProfile(model.name, model.weights_digest, "by hand", needs).write(path)
    return path


def text(budget: str, profile: Path) -> str:
    return f'profile(file="{profile}")' if budget == "profile" else budget


def num_slots(sequence: SequenceCache) -> int:
    return sum(sum(sequence.stored_lens(i)) for i in range(sequence.spec.num_layers))


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_score_spends_its_size(model: Model, profile: Path, budget: str) -> None:
    runner = make_runner(model)
    policies = [f"{score} + {text(budget, profile)} + 2x + {SMALL}" for score in scorers()]
    sequences = [make_sequence(runner, policy, open_len=OPEN_LEN) for policy in policies]
    try:
        runner.prefill_many(sequences, prompt(LENGTH))
        num_heads = model.spec.num_layers * model.spec.layers[0].num_kv_heads
        most = (LENGTH // 2 - OPEN_LEN) * num_heads
        for sequence in sequences:
            if sequence.policy.prefill.budget.may_leave:
                assert 10 * num_heads <= num_slots(sequence) <= most, sequence.policy.short
            else:
                assert num_slots(sequence) == most, sequence.policy.short
    finally:
        for sequence in sequences:
            sequence.release()


@pytest.mark.parametrize("budget", ["lava", "xkv", "dynamickv", "adaptive(loss=0.2)", "profile"])
def test_a_shared_prefill_keeps_what_single_ones_keep(model: Model, profile: Path, budget: str) -> None:
    runner, ids = make_runner(model, chunk_len=40), prompt(LENGTH)
    policies = [f"{score} + {text(budget, profile)} + 2x + {SMALL}" for score in ("snapkv(window=8)", "kvzip", "h2o")]
    together, alone = ([make_sequence(runner, policy) for policy in policies] for _ in range(2))
    try:
        runner.prefill_many(together, ids)
        for sequence in alone:
            runner.prefill([sequence], [ids])
        assert [kept(sequence) for sequence in together] == [kept(sequence) for sequence in alone]
    finally:
        for sequence in (*together, *alone):
            sequence.release()
