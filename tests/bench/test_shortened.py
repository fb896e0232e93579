"""Policies that shorten: their prompts are cut before they are tokenized, and their bytes are of the original."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.bench.prompts import PromptBuilder
from kvfold.bench.record import NEEDS_QUESTION, PROTECTED, TOO_LONG, Row, read_run
from kvfold.bench.shortened import PromptShortener, cache_policy, shorten_plan
from kvfold.bench.size_cache import Cell, cells
from kvfold.bench.summary import lines
from kvfold.bench.workloads import Sample, Setting, find, workloads
from kvfold.errors import PolicyError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from tests.bench.runs import SMALL, bench, rows

HEAD = "shorten(head, 2x, keep=none, least=1)"
RANK = "shorten(rank, 2x, keep=none, least=1)"
PLAIN = f"keydiff + {SMALL}"
STACKED = f"{HEAD} + {PLAIN}"
POLICIES = (HEAD, RANK, PLAIN, STACKED)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.conftest import _built

    folder = tmp_path_factory.mktemp("shortened") / "run"
    bench(_built("llama"), folder, policies=POLICIES, memories=("45%", "own"), workloads=("passkey",)).run()
    return folder


def _of(folder: Path, policy: str, mode: str = "known") -> list[Row]:
    return [row for row in rows(folder) if (row.policy, row.mode) == (policy, mode)]


def test_rows_record_original_and_sent_tokens(done: Path) -> None:
    for row in rows(done):
        assert row.prompt_tokens > 700
        assert row.sent_share == (1.0 if row.policy in ("full", PLAIN) else pytest.approx(0.6, abs=0.08)), row.policy


def test_stacked_and_plain_policies_hold_the_same_bytes(done: Path) -> None:
    """Shares are of the full cache of the original prompt, so the stacked one keeps more of fewer slots."""
    for mode in ("known", "unknown"):
        for plain, stacked in zip(_of(done, PLAIN, mode), _of(done, STACKED, mode), strict=True):
            assert plain.full_bytes == stacked.full_bytes
            assert 0.4 < stacked.resident_bytes / stacked.full_bytes <= 0.45
            assert stacked.resident_bytes == pytest.approx(plain.resident_bytes, rel=0.06)
            assert stacked.resolved.startswith(f"{STACKED} + ") and plain.resolved.startswith(f"{PLAIN} + ")
            sizes = [Policy.parse(row.resolved).prefill.size for row in (stacked, plain)]
            assert sizes[0].times < sizes[1].times  # type: ignore[union-attr]


def test_what_shortens_alone_has_the_memory_own_and_is_compared_with_the_full_cache(done: Path) -> None:
    found = _of(done, HEAD)
    assert {row.memory for row in found} == {"own"}
    for row, full in zip(found, _of(done, "full"), strict=True):
        assert row.resident_bytes < 0.8 * full.resident_bytes and row.full_bytes == full.full_bytes
    assert [row.kl is not None and row.kl > 0.001 for row in found] == [True, False]


def test_a_selector_that_needs_the_question_runs_where_it_is_known(done: Path) -> None:
    assert all(row.score is not None for row in _of(done, RANK))
    assert {(row.note, row.score) for row in _of(done, RANK, "unknown")} == {(NEEDS_QUESTION, None)}


def test_the_summary_tells_tokens_sent(done: Path) -> None:
    told = {line.policy: line.sent_percent for line in lines(read_run(done).rows) if line.mode == "known"}
    assert told["full"] == 100 and 50 < told[HEAD] < 70


def test_prompts_beyond_the_context_run_where_they_are_shortened_into_it(model: Model, tmp_path: Path) -> None:
    """The tiny model has 1,024 positions."""
    policies = ("shorten(head, 4x, keep=none)", PLAIN)
    asked = {"policies": policies, "lengths": (2400,), "workloads": ("passkey",), "samples": 1}
    bench(model, tmp_path / "run", memories=("45%", "own"), fidelity=0, diagnostics=0, **asked).run()
    notes = {row.policy: (row.note, row.score is None) for row in rows(tmp_path / "run")}
    assert notes == {"full": (TOO_LONG, True), PLAIN: (TOO_LONG, True), policies[0]: ("", False)}


def test_protected_text_beyond_the_size_is_a_cell(model: Model) -> None:
    policy = 'shorten(head, 8x, keep="numbers", least=1)'
    sample = Sample("kv", 0, "It cost 5 kg. " * 40, "\nWhat?", ("5",), 4)
    prompter = PromptBuilder(model.tokenizer)
    assert PromptShortener(model, prompter).sent(sample, prompter.prompt(sample), policy).note == PROTECTED


def test_question_and_instructions_are_never_cut(model: Model) -> None:
    prompter = PromptBuilder(model.tokenizer)
    setting = Setting(900, 0, prompter.count_tokens)
    for name in ("passkey", "chat", "rag", "needle", "lines"):
        workload = find(name)
        sample = workload.sample(setting, workload.ready[0], 0)
        instruction = sample.context[: sample.num_instruction_chars]
        prompt = prompter.prompt(sample)
        found = (
            PromptShortener(model, prompter)
            .sent(sample, prompt, "shorten(tail, 4x, keep=none, units=fixed(20), least=1)")
            .prompt
        )
        assert found.question_ids == prompt.question_ids and found.original is prompt
        assert len(instruction) > 20 and len(found.context_ids) < len(prompt.context_ids)
        assert instruction in model.tokenizer.decode(list(found.context_ids))


@pytest.mark.parametrize("name", [workload.name for workload in workloads() if workload.name != "longbench"])
def test_instructions_are_those_of_every_sample(name: str) -> None:
    """What two samples of a task begin with alike is an instruction; example and rules may differ."""
    workload = find(name)
    first = workload.sample(Setting(1500, 0, lambda text: len(text) // 4), workload.ready[0], 0)
    assert 0 < first.num_instruction_chars < len(first.context) / 2
    assert first.context[: first.num_instruction_chars].rstrip() != first.context.rstrip()


def test_parts_of_a_policy() -> None:
    assert cache_policy(HEAD) == "full" and cache_policy("int4") == "int4"
    assert cache_policy(f"{HEAD} + snapkv(window=8) + prefill(ada + 4x) + int4") == (
        "snapkv(window=8) + prefill(ada + 4x) + int4"
    )
    assert shorten_plan(PLAIN) is None and str(shorten_plan(STACKED).to) == "2x"  # type: ignore[union-attr]


def test_shortening_is_a_size_of_its_own() -> None:
    assert cells([HEAD, STACKED], ["45%", "own"])[1:] == [Cell(HEAD, "own"), Cell(STACKED, "45%")]
    with pytest.raises(PolicyError, match="add own to the memories"):
        cells([HEAD], ["45%"])
