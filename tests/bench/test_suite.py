"""The benchmark's loop on a tiny random model: every row there, the model's own answers, resumable, deterministic."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.bench import suite
from kvfold.bench.answers import answer
from kvfold.bench.plan import Batch
from kvfold.bench.record import MODES, OUT_OF_MEMORY, ROWS, TOO_SMALL, Row, read_run
from kvfold.bench.suite import Bench
from kvfold.bench.workloads import Setting, find
from kvfold.errors import InputError, OutOfPages, PolicyError
from kvfold.models.loader import Model
from tests.bench.runs import SIZED, bench, rows
from tests.tiny import build, greedy


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run."""
    from tests.conftest import _built

    folder = tmp_path_factory.mktemp("done") / "run"
    bench(_built("llama"), folder).run()
    return folder


def test_every_cell_has_a_row(done: Path) -> None:
    found = rows(done)
    cells = {("full", "100%"), ("int4", "100%"), ("int4", "45%"), *((policy, "45%") for policy in SIZED)}
    places = {
        (w, t, 800, i, m) for w, t in (("passkey", "passkey"), ("chat", "requests")) for i in (0, 1) for m in MODES
    }
    assert {row.key for row in found} == {(*place, *cell) for place in places for cell in cells}
    assert len(found) == len(places) * len(cells)
    assert {row.key for row in read_run(done).prompts} == {place[:4] for place in places}


def test_the_full_cache_answers_like_the_model_itself(done: Path, model: Model) -> None:
    bench_ = bench(model, done)
    setting = Setting(800, 0, bench_.prompter.count_tokens)
    sample = find("passkey").sample(setting, "passkey", 1)
    prompt = bench_.prompter.prompt(sample)
    ids = greedy(build(), prompt.context_ids + prompt.question_ids, sample.max_new_tokens)
    expected = model.tokenizer.decode(ids, skip_special_tokens=True)
    found = [row for row in rows(done) if (row.workload, row.index, row.policy) == ("passkey", 1, "full")]
    assert [row.answer for row in found] == [expected] * 2
    assert {row.new_tokens for row in found} == {sample.max_new_tokens}


def test_bytes_fit_the_memory_and_are_those_of_what_was_compressed(done: Path, model: Model) -> None:
    for row in rows(done):
        if row.policy in SIZED:
            assert 0.4 < row.resident_bytes / row.full_bytes <= 0.45, row
            assert row.resolved.startswith(f"{row.policy} + ") and row.resolved.endswith("x")
        assert (row.score is None) == (row.note == TOO_SMALL) == ((row.policy, row.memory) == ("int4", "45%"))
        assert row.full_bytes <= model.spec.full_bytes(row.prompt_tokens - 1)
    known, unknown = ([row for row in rows(done) if row.mode == mode and not row.note] for mode in MODES)
    assert all(a.full_bytes > b.full_bytes for a, b in zip(known, unknown, strict=True))


def test_fidelity_and_diagnostics_are_those_of_the_first_sample(done: Path) -> None:
    for row in rows(done):
        assert (row.kl is not None) == (row.index == 0 and not row.note)
        if row.policy == "full" and row.index == 0:
            assert (row.kl, row.agreement, row.bits_lost) == (0.0, 1.0, 0.0)
        if row.policy in SIZED and row.kl is not None:
            assert row.kl > 0.001
    timed = {row.index for row in read_run(done).rows if row.decode_ms is not None}
    looked = read_run(done).diagnostics
    assert timed == {0} and {row.index for row in looked} == {0} and {row.policy for row in looked} == set(SIZED)
    assert all(0 < share < 0.9 for row in looked for share in row.share_kept)


class _Stopped(Bench):
    """Stops like Ctrl-C when the third batch begins."""

    def _run(self, batch: Batch) -> list[Row]:
        if batch == self.batches[2]:
            raise KeyboardInterrupt
        return super()._run(batch)


def test_a_run_goes_on_where_it_stopped(
    done: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a batch, whose last row was torn."""
    folder = tmp_path / "run"
    first = bench(model, folder)
    first.__class__ = _Stopped
    with pytest.raises(KeyboardInterrupt):
        first.run()
    lines = (folder / ROWS).read_bytes().splitlines(keepends=True)
    assert 0 < len(lines) < len(rows(done))
    (folder / ROWS).write_bytes(b"".join(lines[:-3]) + lines[-3][:40])
    ran: list[int] = []
    monkeypatch.setattr(suite, "answer", lambda runner, jobs: ran.append(len(jobs)) or answer(runner, jobs))  # type: ignore[func-returns-value]
    bench(model, folder).run()
    assert rows(folder) == rows(done)
    assert len(ran) == len(first.batches) - 1  # one batch was whole
    bench(model, folder).run()
    assert len(ran) == len(first.batches) - 1 and rows(folder) == rows(done)


def test_shards_make_up_the_run_row_by_row(done: Path, model: Model, tmp_path: Path) -> None:
    from kvfold.bench.plan import Shard

    found: list[Row] = []
    for index in range(2):
        bench(model, tmp_path / str(index), shard=Shard(index, 2)).run()
        found += rows(tmp_path / str(index))
    assert sorted(found, key=lambda row: row.key) == rows(done)


def test_another_configuration_is_refused(done: Path, model: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds a run with seed 0, not 5; name another folder with --out"):
        bench(model, done, seed=5)
    with pytest.raises(InputError, match=r"holds a run with memories 100%, 45%, not 45%"):
        bench(model, done, memories=("45%",))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files and no run"):
        bench(model, tmp_path)


@pytest.mark.parametrize("policy", ["keydiff + pages(topk=4) + slot + nonsense", "learned + global"])
def test_what_the_model_cannot_run_is_told_before_a_folder_is_made(policy: str, model: Model, tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        bench(model, tmp_path / "run", policies=(policy,))
    assert not (tmp_path / "run").exists()


def test_too_small_a_memory_is_a_cell(model: Model, tmp_path: Path) -> None:
    bench(model, tmp_path / "run", workloads=("passkey",), samples=1, memories=("2%",)).run()
    noted = {row.policy: (row.note, row.score is None) for row in rows(tmp_path / "run")}
    assert noted == {
        "full": ("", False),
        "int4": (TOO_SMALL, True),
        SIZED[0]: (TOO_SMALL, True),
        SIZED[1]: (TOO_SMALL, True),
    }


def test_a_batch_that_does_not_fit_is_parted_and_what_never_fits_is_a_cell(
    done: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner refuses more than three caches at once, and the full one always."""
    first = bench(model, tmp_path / "run", workloads=("passkey",), fidelity=0, diagnostics=0)
    prefill_many = first.runner.prefill_many

    def cramped(sequences: list[object], tokens: list[int], **more: object) -> object:
        if len(sequences) > 3 or any(str(s.policy.short) == "full" for s in sequences):  # type: ignore[attr-defined]
            raise OutOfPages("no room")
        return prefill_many(sequences, tokens, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(first.runner, "prefill_many", cramped)
    first.run()
    found = {row.key: row for row in rows(tmp_path / "run")}
    whole = {row.key: row for row in rows(done) if row.workload == "passkey"}
    assert found.keys() == whole.keys()
    for key, row in found.items():
        if row.policy == "full":
            assert row.note == OUT_OF_MEMORY and row.score is None
        else:
            assert (row.answer, row.note) == (whole[key].answer, whole[key].note)


def test_memory_is_given_back_however_a_batch_ends(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench(model, tmp_path / "run", workloads=("passkey",), samples=1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first.runner, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert model.arena.used_bytes == 0
