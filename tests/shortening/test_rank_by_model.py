"""`rank(judge)` and `rank(attention)` keep the units that the loaded model's own numbers put first."""

from __future__ import annotations

import numpy as np
import pytest

from kvfold.errors import InputError, PolicyError
from kvfold.models.loader import Model
from kvfold.policy import Policy
from kvfold.shortening.base import Task
from kvfold.shortening.embedders.hashed import HashedTfIdf
from kvfold.shortening.loaded_model import LoadedModel
from kvfold.shortening.parts import parts_of
from kvfold.shortening.selectors.rank import Rank
from kvfold.shortening.shorten import Shortened, shorten_text
from kvfold.shortening.text import plan_of
from kvfold.shortening.tokens import TokenOffsets

THINGS = ("lamp", "bell", "boat", "clock", "drum", "flag", "globe", "harp", "jug", "kite")
TEXT = " ".join(f"The {thing} is {len(thing)} years old{'!' * number}" for number, thing in enumerate(THINGS)) + "."
TEXT = TEXT.replace("old", "old.").replace(".!", ".")
QUESTION = "How old is the boat?"
PROMPT = "Question: {}\nSentence: {}\nIs this sentence useful in answering the question? Answer Yes or No."


def shortened(text: str, by: str, model: LoadedModel, question: str = QUESTION, **options: str) -> Shortened:
    plan = plan_of(by, "3x", options.get("keep", "none"))
    return shorten_text(text, plan, question=question, tokenizer=model.model.tokenizer, model=model)


def task_of(text: str, told: LoadedModel) -> Task:
    units, tokens = parts_of(text), TokenOffsets.of(text, told.model.tokenizer)
    kept_n = np.zeros(len(units), dtype=bool)
    return Task(text, units, units, kept_n, tokens, 0, QUESTION, HashedTfIdf(), model=told)


def log_odds(told: LoadedModel, text: str, sentence: str) -> float:
    (yes,) = told.yes_probabilities(text, [PROMPT.format(QUESTION, sentence.strip())])
    return float(np.log(yes / (1 - yes)))


def test_a_judge_ranks_by_the_odds_of_yes(model: Model) -> None:
    told = LoadedModel(model)
    worth = Rank("judge").worth(task := task_of(TEXT, told))
    assert len(worth) == len(THINGS) and len(set(worth)) > 5
    assert worth == pytest.approx([log_odds(told, TEXT, text) for text in task.texts()], abs=1e-3)
    left = shortened(TEXT, "rank(judge)", told)
    first = task.text_of(task.units[int(worth.argmax())])
    assert first in left.text and left.num_tokens <= left.num_original_tokens / 3 + 1


def test_a_unit_is_judged_behind_the_first_window_that_holds_it(model: Model) -> None:
    told, whole = LoadedModel(model, context_len=160), LoadedModel(model)
    task = task_of(TEXT, told)
    windows = told.windows(TEXT)
    reports: list[tuple[int, int]] = []
    worth = Rank("judge").worth(Task(**{**vars(task), "progress": lambda *report: reports.append(report)}))
    assert len(windows) >= 3
    for unit, found in zip(task.units, worth, strict=True):
        low, high = next(window for window in windows if unit.end <= window[1])
        assert found == pytest.approx(log_odds(whole, TEXT[low:high], task.text_of(unit)), abs=1e-3)
    assert reports[-1] == (len(THINGS), len(THINGS)) and reports == sorted(reports)


def test_attention_ranks_by_the_mean_over_the_tokens_of_a_unit(model: Model) -> None:
    told = LoadedModel(model)
    starts, score = told.attention(TEXT, QUESTION)
    worth = Rank("attention").worth(task := task_of(TEXT, told))
    for unit, found in zip(task.units, worth, strict=True):
        mine = score[(starts >= unit.start) & (starts < unit.end)]
        assert found == pytest.approx(mine.mean(), rel=1e-6, abs=1e-9)
    first = task.text_of(task.units[int(worth.argmax())])
    assert first in shortened(TEXT, "rank(attention)", told).text


@pytest.mark.parametrize("by", ["rank(judge)", "rank(attention)"])
def test_what_stays_is_of_the_text_in_order_and_twice_the_same(model: Model, by: str) -> None:
    text = TEXT.replace("jug", "jug X-42b7")
    found = shortened(text, by, LoadedModel(model), keep="ids")
    assert "X-42b7" in found.text and found.is_extractive
    assert found.text == "".join(text[start:end] for start, end in found.spans)
    assert all(end <= start for (_, end), (start, _) in zip(found.spans, found.spans[1:], strict=False))
    assert found.spans == shortened(text, by, LoadedModel(model), keep="ids").spans
    assert model.arena.used_bytes == 0


def test_a_policy_names_what_ranks() -> None:
    for by in ("hybrid", "judge", "attention"):
        policy = Policy.parse(f"shorten(rank({by}), 4x) + full")
        assert policy.shorten is not None and policy.shorten.by == Rank(by)
        assert Policy.parse(str(policy)) == policy and policy.shorten.by.needs_model is (by != "hybrid")
    fingerprints = {Policy.parse(f"shorten({by}, 4x)").fingerprint for by in ("rank", "rank(judge)", "rank(attention)")}
    assert len(fingerprints) == 3
    with pytest.raises(PolicyError, match="by takes hybrid or judge or attention, not oracle"):
        Policy.parse("shorten(rank(oracle), 4x)")


def test_without_a_model_there_is_no_judge() -> None:
    with pytest.raises(InputError, match="this rank asks a model; give one"):
        shorten_text(TEXT, plan_of("rank(judge)", "4x"), question=QUESTION)
