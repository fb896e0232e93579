"""Sentences: means over what stands between two full stops, told by the tokens that a runner reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.errors import FileError, PolicyError
from kvfold.models.cache import Cache
from kvfold.models.loader import Model
from kvfold.models.sentences import ending_tokens
from kvfold.score import KNorm, Needs, Sentence
from kvfold.session import Session
from tests.engine.runs import make_runner, make_sequence
from tests.score.views import make_view

TEXT = "IT RAINED. WHO SAW? (NOBODY DID!) NOT ONE MAN,\nFOR 3 DAYS. IT WAS SO QUIET"  # a token for each character
ENDS = [index for index, character in enumerate(TEXT) if character in ".?!\n"]
INF = torch.inf
POLICY = "sentence(random) + 40tok + protect(sinks=0, recent=8)"


def test_a_slot_scores_the_mean_of_its_sentence() -> None:
    """knorm scores -|k|. Head 0 holds tokens 0-4, head 1 holds 0, 2, 4 and padding; sentences are 0-1 and 2-4."""
    view = make_view((5,), (5, 3), Needs())
    view.k_RSD = torch.zeros(2, 5, 8)
    view.k_RSD[..., 0] = torch.tensor([[1.0, 3.0, 4.0, 5.0, 9.0], [5.0, 0.0, 9.0, 7.0, 7.0]])
    view.position_RS = torch.tensor([[0, 1, 2, 3, 4], [0, 2, 4, 0, 0]])
    view.sentence_RS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])
    assert Sentence(KNorm(), shared=False).score(view).tolist() == [[-2, -2, -6, -6, -6], [-5, -4.5, -4.5, -INF, -INF]]
    together_RS = Sentence(KNorm()).score(view)
    assert together_RS[0].tolist() == pytest.approx([-3, -3, -5.4, -5.4, -5.4])
    assert together_RS[1].tolist() == pytest.approx([-3, -5.4, -5.4, -INF, -INF])


def test_ends_are_told_by_the_text_of_tokens(model: Model) -> None:
    texts = {model.tokenizer.decode([token]) for token in ending_tokens(model.hf)}
    assert texts == {".", "!", "?", "\n"}


def test_whole_sentences_stay(model: Model) -> None:
    with Session(model, POLICY, template=None, page_size=4, open_len=8) as session:
        session.extend(TEXT)
        kept = session.kept(0, 0)
        assert session.cache.sentences.ends == ENDS
    first = [0, *(end + 1 for end in ENDS)]
    sentences = [set(range(start, end)) for start, end in zip(first, [*first[1:], len(TEXT) - 8], strict=True)]
    cut = [sentence for sentence in sentences if sentence & set(kept) and not sentence <= set(kept)]
    assert len(cut) <= 1  # the last that fits
    assert len(kept) == 40 - 8  # less the open block
    assert any(sentence and not sentence & set(kept) for sentence in sentences)


def test_written_tokens_and_forks_have_sentences(model: Model, tmp_path: Path) -> None:
    stop = next(iter(ending_tokens(model.hf)))
    with Session(model, POLICY, template=None, page_size=4, open_len=8) as session:
        session.extend([1, stop, 1])
        runner, cache = session.runner, session.cache
        runner.decode([cache], [stop])
        runner.decode([cache], [stop], commit=[False])
        cache.open.rollback()
        runner.decode([cache], [1])
        session.token_ids += [stop, 1]
        assert cache.sentences.ends == [1, 3]
        with session.fork() as branch:
            branch.extend([stop])
            assert branch.cache.sentences.ends == [1, 3, 5]
        session.save(tmp_path / "s")
        with Session.load(model, tmp_path / "s") as loaded:
            assert loaded.cache.sentences.ends == [1, 3]
        cache.sentences.ends = [3, 1]
        session.save(tmp_path / "s")
        with pytest.raises(FileError, match="does not fit"):
            Session.load(model, tmp_path / "s")


def test_sequences_that_read_together_have_their_own(model: Model) -> None:
    runner = make_runner(model)
    sequences = [make_sequence(runner, policy) for policy in ("keydiff + 2x", POLICY)]
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    try:
        runner.prefill_many(sequences, ids + ids)
        assert [sequence.sentences.ends for sequence in sequences] == [[], [*ENDS, *(len(ids) + end for end in ENDS)]]
    finally:
        for sequence in sequences:
            sequence.release()


def test_a_drop_in_cache_is_refused(model: Model) -> None:
    with pytest.raises(PolicyError, match="needs token ids to find sentences"):
        Cache(model.hf, "sentence + 4x")


def test_a_model_without_tokenizer_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.models import repeat_prompt as repeat
    from kvfold.models.attach import ModuleState

    monkeypatch.setattr(repeat, "_tokenizer", ModuleState[object]("none"))
    with pytest.raises(PolicyError, match="needs a tokenizer to find sentences"):
        make_sequence(make_runner(model), "sentence + 4x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sentence(longest=0)", "longest must be at least 1"),
        ("sentence(full)", "sentence(full): the inner score keeps everything"),
        ("sentence(chunk(reuse=2))", "write it on the outer sentence"),
    ],
)
def test_what_cannot_work_is_refused(model: Model, text: str, reason: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Session(model, f"{text} + 4x")
    assert reason in str(caught.value)
