"""Keyphrases of a text by YAKE, written from the paper (Campos et al. 2020, Information Sciences 509): no list of
documents, no model. A word scores low, which is good, if it is often capitalised, comes early, is frequent, is in many
sentences, and does not stand beside ever other words, as function words do.

    relatedness = 1 + (distinct words left of it / all left of it + the same for the right) · tf / largest tf
    S = relatedness · ln ln(3 + median sentence) / (casing + frequency / relatedness + spread / relatedness)
    S(phrase) = ∏ S / (tf(phrase) · (1 + ∑ S))
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low

import numpy as np

from kvfold.shortening.base import Floats, Progress, Task
from kvfold.shortening.word_index import WORD, words_of

_RUN = re.compile(r"[^.,;:!?()\[\]{}\"“”«»…\n|]+")
_MAX_WORDS = 3  # of a phrase
_SHORT = 8  # tokens: shorter units are no better for it
_WORDS_OF_GRAMMAR = (
    "the and that this with from have has had was were are been being for not but which who whom whose what "
    "when where why how all any both each few more most other some such than then there their them they these "
    "those through under until very will would could should shall may might must can into onto over about "
    "above after again against before below between during further here his her hers him she its itself our "
    "out own same too you your also because while did doe doing done just only once one two per upon via yet "
    "nor off since without every never himself "
)
_FUNCTION_WORDS = frozenset(words_of(_WORDS_OF_GRAMMAR))


@dataclass
class _Word:
    times: int = 0
    capitals: int = 0  # with a capital inside a sentence, or all capitals
    places: list[int] = field(default_factory=list)  # numbers of sentences
    left: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)


def keyphrases(sentences: Sequence[str], count: int, progress: Progress | None = None) -> dict[str, float]:
    """The best phrases, each with the logarithm of how many times better it scores than the first that is left out.

    Unlike YAKE's, phrases of several words occur twice at least: what stands once tells no sentence from another.
    """
    words: dict[str, _Word] = {}
    phrases: Counter[str] = Counter()
    for number, sentence in enumerate(sentences):
        for run in _RUN.findall(sentence):
            normal = words_of(run)
            _observe(words, normal, WORD.findall(run), number)
            phrases.update(phrases_of(normal))
        if progress is not None:
            progress(number + 1, len(sentences))
    score = _word_scores(words, len(sentences))
    often = ((phrase, times) for phrase, times in phrases.items() if times > 1 or " " not in phrase)
    scored = sorted((round(_phrase_score(phrase, times, score), 9), phrase) for phrase, times in often)
    least = scored[count][0] if len(scored) > count else scored[-1][0] if scored else 0.0
    return {phrase: math.log((least + 1e-9) / (value + 1e-9)) for value, phrase in scored[:count]}


def phrase_weights(task: Task, count: int, progress: Progress | None = None) -> Floats:
    """[N]: weights of the best phrases that a unit holds, by the root of its length."""
    weight = keyphrases(task.texts(), count, progress)
    held = [sorted(phrases_in(text)) for text in task.texts()]
    held_N = np.array([sum(weight.get(phrase, 0.0) for phrase in phrases) for phrases in held])
    return held_N / np.sqrt(np.maximum(task.num_tokens_N, _SHORT))


def phrases_of(words: Sequence[str]) -> Iterator[str]:
    """Runs of up to three words, none of them a function word, a number or a letter."""
    is_content = [len(word) > 2 and word not in _FUNCTION_WORDS and not word.isdecimal() for word in words]
    for low in range(len(words)):
        for high in range(low + 1, min(low + _MAX_WORDS, len(words)) + 1):
            if not is_content[high - 1]:
                break
            yield " ".join(words[low:high])


def phrases_in(sentence: str) -> set[str]:
    """All phrases of a sentence."""
    return {phrase for run in _RUN.findall(sentence) for phrase in phrases_of(words_of(run))}


def _observe(words: dict[str, _Word], run: Sequence[str], written: Sequence[str], number: int) -> None:
    has_case = len(written) == len(run)  # some scripts change their length in lower case
    for at, name in enumerate(run):
        word = words.setdefault(name, _Word())
        word.times += 1
        if not word.places or word.places[-1] != number:
            word.places.append(number)
        if has_case and ((at and written[at][0].isupper()) or (len(name) > 1 and written[at].isupper())):
            word.capitals += 1
        if at:
            word.left.append(run[at - 1])
        if at + 1 < len(run):
            word.right.append(run[at + 1])


def _word_scores(words: dict[str, _Word], num_sentences: int) -> dict[str, float]:
    times = np.array([word.times for word in words.values()], dtype=np.float64)
    if not len(times):
        return {}
    usual, most = float(times.mean() + times.std()), float(times.max())
    return {name: _word_score(word, usual, most, num_sentences) for name, word in words.items()}


def _word_score(word: _Word, usual: float, most: float, num_sentences: int) -> float:
    casing = word.capitals / (1 + math.log(word.times))
    place = math.log(math.log(3 + median_low(word.places)))
    beside = sum(len(set(side)) / len(side) for side in (word.left, word.right) if side)
    related = 1 + beside * word.times / most
    spread = len(word.places) / num_sentences
    return related * place / (casing + word.times / usual / related + spread / related)


def _phrase_score(phrase: str, times: int, score: dict[str, float]) -> float:
    scores = [score[word] for word in phrase.split(" ")]
    return math.prod(scores) / (times * (1 + sum(scores)))
