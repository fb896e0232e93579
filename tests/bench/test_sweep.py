"""A sweep on a tiny random model: the same answers as alone and as the model's own, all memory back, resumable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.bench.needle import Needles, Prompt
from kvfold.bench.record import TOO_SMALL
from kvfold.bench.rows import MODES, Row, RowFile, read_rows
from kvfold.bench.sweep import Job, Sweep, jobs, run_all
from kvfold.errors import PolicyError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from tests.bench.examples import FACTS
from tests.tiny import build, greedy, ready

POLICIES = ("snapkv", "keydiff + ada + int4", "h2o")
NUM_TOKENS = 900
FULL_ONLY = jobs([], [])


@pytest.fixture(scope="module")
def model() -> Model:
    return ready()


@pytest.fixture(scope="module")
def needles(model: Model) -> Needles:
    return Needles(model.tokenizer, NUM_TOKENS)


def _sweep(model: Model, policies: Sequence[str] = POLICIES, sizes: Sequence[str] = ("2x", "8x")) -> Sweep:
    return Sweep(model, FACTS, jobs(policies, sizes))


def _short(prompt: Prompt) -> Prompt:
    return replace(prompt, max_new_tokens=6)


def test_jobs_are_the_full_cache_and_policies_by_size_and_mode() -> None:
    found = jobs(["tova", "h2o + ada"], ["2x", "8x"])
    assert len(found) == len(set(found)) == (1 + 2 * 2) * 2
    assert found[0] == Job("full", "", "known")
    assert {str(Policy.parse(job.text).prefill.size) for job in found if job.size == "8x"} == {"8x"}


def test_policies_that_are_complete_run_once() -> None:
    found = jobs(["int4", "streaming + 8x + recall", "tova", "int4"], ["2x", "4x"], ["known"])
    assert [job.text for job in found] == ["full", "int4", "streaming + 8x + recall", "tova + 2x", "tova + 4x"]


def test_bad_policies_are_refused_at_once(model: Model) -> None:
    with pytest.raises(PolicyError, match="nonsense"):
        _sweep(model, ["nonsense"])


def test_full_cache_answers_like_the_model_itself(model: Model, needles: Needles) -> None:
    prompt = _short(needles.prompt(0))
    expected = greedy(build(), prompt.document_ids + prompt.question_ids, prompt.max_new_tokens)
    rows = Sweep(model, FACTS, FULL_ONLY).run(prompt, FULL_ONLY)
    assert [row.answer for row in rows] == [model.tokenizer.decode(expected, skip_special_tokens=True).strip()] * 2


def test_a_batch_of_policies_answers_like_each_alone(model: Model, needles: Needles) -> None:
    sweep, prompt = _sweep(model), _short(needles.prompt(1))
    together = {row.key: row for row in sweep.run(prompt, sweep.jobs)}
    alone = [row for job in sweep.jobs for row in sweep.run(prompt, [job])]
    assert together == {row.key: row for row in alone}
    assert len({row.answer for row in alone}) > 2  # policies do differ


def test_bytes_and_slots_are_those_after_compression(model: Model, needles: Needles) -> None:
    prompt = _short(needles.prompt(0))
    sweep = _sweep(model, ["keydiff"], ["8x"])
    rows = {(row.policy, row.mode): row for row in sweep.run(prompt, sweep.jobs)}
    compressed = {"known": prompt.num_tokens - 1, "unknown": len(prompt.document_ids)}
    for mode in MODES:
        full, small = rows["full", mode], rows["keydiff", mode]
        assert full.slots == compressed[mode] and full.full_bytes == model.spec.full_bytes(compressed[mode])
        assert 0 < small.slots <= -(-compressed[mode] // 8)
        assert small.bytes < full.bytes / 4


def test_the_question_is_evicted_from_only_when_known(model: Model, needles: Needles) -> None:
    """`streaming` keeps a border: of a known question its last tokens, of an unknown one everything."""
    prompt = _short(needles.prompt(0))
    sweep = _sweep(model, ["streaming"], ["8x"])
    seen: dict[str, list[int]] = {}
    decode = sweep.runner.decode

    def spy(sequences: Sequence[object], tokens: Sequence[int]) -> object:
        for sequence, mode in zip(sequences, MODES, strict=True):
            seen.setdefault(mode, sequence.positions(0, 0).tolist())  # type: ignore[attr-defined]
        return decode(sequences, tokens)  # type: ignore[arg-type]

    sweep.runner.decode = spy  # type: ignore[method-assign, assignment]
    sweep.run(prompt, [Job("streaming", "8x", mode) for mode in MODES])
    question = set(range(len(prompt.document_ids), prompt.num_tokens - 1))
    assert question <= set(seen["unknown"])
    assert not question <= set(seen["known"])


def test_too_small_a_size_is_a_note(model: Model, needles: Needles) -> None:
    sweep = _sweep(model, ["snapkv"], ["2x", "100x"])
    rows = sweep.run(_short(needles.prompt(0)), sweep.jobs)
    noted = {row.size: row.note for row in rows}
    assert noted == {"": "", "2x": "", "100x": TOO_SMALL}
    assert all((row.score is None) == (row.size == "100x") for row in rows)


def test_memory_is_given_back(model: Model, needles: Needles, monkeypatch: pytest.MonkeyPatch) -> None:
    free = model.arena.free_bytes
    sweep = _sweep(model, ["snapkv"], ["2x", "100x"])
    sweep.run(_short(needles.prompt(0)), sweep.jobs)
    assert model.arena.free_bytes == free

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep.runner, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(needles.prompt(0), sweep.jobs)
    assert model.arena.free_bytes == free


class _Interrupted(Sweep):
    """Stops like Ctrl-C when the second prompt begins."""

    def run(self, prompt: Prompt, jobs: Sequence[Job]) -> list[Row]:
        if prompt.index == 1:
            raise KeyboardInterrupt
        return super().run(_short(prompt), jobs)


class _Counting(Sweep):
    """Remembers what was run."""

    ran: list[tuple[int, int]]

    def run(self, prompt: Prompt, jobs: Sequence[Job]) -> list[Row]:
        self.ran = [*getattr(self, "ran", []), (prompt.index, len(jobs))]
        return super().run(_short(prompt), jobs)


def test_a_run_goes_on_where_it_stopped(model: Model, needles: Needles, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = jobs(["keydiff"], ["4x"])
    with pytest.raises(KeyboardInterrupt):
        run_all(_Interrupted(model, FACTS, first), needles, RowFile(path, FACTS), 3)
    assert {row.prompt for row in read_rows(path)} == {0} and len(read_rows(path)) == 4

    more = _Counting(model, FACTS, jobs(["keydiff", "knorm"], ["4x"]))
    assert run_all(more, needles, RowFile(path, FACTS), 2)
    assert more.ran == [(0, 2), (1, 6)]
    rows = read_rows(path)
    assert len({row.key for row in rows}) == len(rows) == 12

    again = _Counting(model, FACTS, first)
    assert run_all(again, needles, RowFile(path, FACTS), 2)
    assert not hasattr(again, "ran") and read_rows(path) == rows


def test_many_jobs_run_some_at_a_time(
    model: Model, needles: Needles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.bench.sweep._LANES", 4)
    sweep = _Counting(model, FACTS, jobs(["keydiff", "knorm"], ["4x"]))
    file = RowFile(tmp_path / "rows.jsonl", FACTS)
    assert run_all(sweep, needles, file, 1)
    assert sweep.ran == [(0, 4), (0, 2)] and len(read_rows(file.path)) == 6


def test_a_deadline_ends_before_the_next_prompt(model: Model, needles: Needles, tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.jsonl", FACTS)
    assert not run_all(_Counting(model, FACTS, FULL_ONLY), needles, file, 2, deadline=0.0)
    assert read_rows(file.path) == []
