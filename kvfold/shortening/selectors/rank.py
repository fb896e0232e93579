"""`rank`: the units that a question asks for, by words and vectors, or by what the loaded model says of them.

N units   T tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kvfold.policy.registry import register
from kvfold.shortening.base import Floats, Progress, Selector, Task
from kvfold.shortening.relevance import relevance

_PROMPT = "Question: {question}\nSentence: {unit}\nIs this sentence useful in answering the question? Answer Yes or No."
_MOST_CHARS = 2000  # of a unit that is quoted to the model
_LEAST = 1e-9  # a probability whose logarithm is still a number


@register(
    "selector",
    "rank",
    cost="1024·D for each unit; judge: N prompts, attention: 2",
    published="differs: judge and attention read an untrained model",
)
@dataclass(frozen=True)
class Rank(Selector):
    """Question-aware: units that the question's words (BM25) and vector find, and units beside and like those.

    `judge` and `attention` ask the loaded model instead. `judge`, after EXIT (arXiv:2412.12559): p(yes) / (p(yes) +
    p(no)) behind "is this sentence useful in answering the question", with the text in front, read once. `attention`,
    after QUITO (arXiv:2408.00274): mean attention of the question to the tokens of a unit, less that of a neutral
    question. Where a text is longer than the trained context, both read it in windows.

    The papers differ: EXIT trains its judge, keeps what is above 0.5 and has no size; QUITO looks from the last token
    and filters by a Gaussian.
    """

    by: Literal["hybrid", "judge", "attention"] = "hybrid"
    needs_question: ClassVar[bool] = True
    avoids_repeats: ClassVar[bool] = True

    @property
    def needs_model(self) -> bool:
        return self.by != "hybrid"

    @property
    def takes_passages(self) -> bool:
        return self.by == "hybrid"

    def worth(self, task: Task) -> Floats:
        assert task.question is not None
        if self.by == "judge":
            return _judged(task, task.question)
        if self.by == "attention":
            return _attended(task, task.question)
        return relevance(task, task.question)


def _judged(task: Task, question: str) -> Floats:
    """[N]: log-odds of yes, to three digits; a unit is judged behind the first window that holds it."""
    assert task.model is not None
    ends_N = np.array([unit.end for unit in task.units])
    odds_N, known = np.zeros(len(task.units)), 0
    windows = task.model.windows(task.text)
    for low, high in windows:
        until = len(ends_N) if high == windows[-1][1] else int(np.searchsorted(ends_N, high, side="right"))
        texts = [task.text_of(unit).strip()[:_MOST_CHARS] for unit in task.units[known:until]]
        prompts = [_PROMPT.format(question=question, unit=text) for text in texts]
        if prompts:
            found = task.model.yes_probabilities(task.text[low:high], prompts, _behind(task, known))
            yes = np.clip(found, _LEAST, 1 - _LEAST)
            odds_N[known:until] = np.round(np.log(yes) - np.log1p(-yes), 3)
            known = until
    return odds_N


def _behind(task: Task, known: int) -> Progress | None:
    """Reports units judged in a window behind those known before."""
    report = task.progress
    return None if report is None else lambda done, _: report(known + done, len(task.units))


def _attended(task: Task, question: str) -> Floats:
    """[N]: mean over the tokens of each unit."""
    assert task.model is not None
    starts_T, score_T = task.model.attention(task.text, question, task.progress)
    total = np.concatenate((np.zeros(1), np.cumsum(score_T)))
    bounds = np.array([(unit.start, unit.end) for unit in task.units], dtype=np.int64).reshape(-1, 2)
    low_N, high_N = np.searchsorted(starts_T, bounds).T
    found: Floats = (total[high_N] - total[low_N]) / np.maximum(high_N - low_N, 1)
    return found
