"""RULER's question answering: the documents that hold the answer, shuffled among others of the same file.

SQuAD: {"data": [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}], "is_impossible"?}]}]}]};
paragraphs of the same article come first as distractors. HotpotQA: [{"question", "answer", "context": [[title,
[sentence, …]], …]}]; all of a question's own documents count as needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from kvfold.bench.workloads.base import Sample, Setting
from kvfold.bench.workloads.fill import fit
from kvfold.errors import InputError

_ONLY = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
_DOCUMENTS = f"{_ONLY}\n\nThe following are given documents.\n\n"


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]  # that hold the answer
    related: tuple[str, ...] = ()  # the distractors to take first


@dataclass(frozen=True)
class Corpus:
    questions: tuple[Question, ...]
    documents: tuple[str, ...]  # sorted, each once


def qa(corpus: Corpus, setting: Setting, task: str, index: int, random: Random) -> Sample:
    """A run's questions are the file's in an order of its seed, so none comes twice before all have come."""
    turn = Random(f"{setting.seed}/{task}").sample(range(len(corpus.questions)), len(corpus.questions))
    question = corpus.questions[turn[index % len(turn)]]
    documents, order = _documents(corpus, question, random), random.random()

    def make(count: int) -> Sample:
        chosen = documents[:count]
        Random(order).shuffle(chosen)
        listed = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(chosen, 1))
        context = _DOCUMENTS + listed
        asked = f"\n\n{_ONLY}\n\nQuestion: {question.text}"
        facts, start = {"documents": count}, len(_DOCUMENTS)
        return Sample(task, index, context, asked, question.answers, 32, "Answer:", facts, start, question.text)

    return fit(setting, make, least=len(question.documents), most=len(documents))


def _documents(corpus: Corpus, question: Question, random: Random) -> list[str]:
    """All of the corpus: needed, related, other."""
    known = {*question.documents, *question.related}
    others = [document for document in corpus.documents if document not in known]
    related = random.sample(question.related, len(question.related))
    return [*question.documents, *related, *random.sample(others, len(others))]


@cache
def read_squad(path: Path) -> Corpus:
    return _read(path, "SQuAD", _from_squad)


@cache
def read_hotpot(path: Path) -> Corpus:
    return _read(path, "HotpotQA", _from_hotpot)


def _read(path: Path, kind: str, questions: Callable[[Any], list[Question]]) -> Corpus:
    try:
        found = questions(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"the questions {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{path} is no file in {kind}'s format; give the JSON file that {kind} is published as"
        ) from None
    if not found:
        raise InputError(f"{path} holds no question with an answer; give the JSON file that {kind} is published as")
    return Corpus(
        tuple(found), tuple(sorted({text for question in found for text in question.documents + question.related}))
    )


def _from_squad(content: Any) -> list[Question]:
    found = []
    for article in content["data"]:
        contexts = list(dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"]))
        for paragraph in article["paragraphs"]:
            related = tuple(context for context in contexts if context != paragraph["context"])
            found += [
                Question(asked["question"], _answers(asked), (paragraph["context"],), related)
                for asked in paragraph["qas"]
                if not asked.get("is_impossible")
            ]
    return found


def _answers(asked: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))


def _from_hotpot(content: Any) -> list[Question]:
    return [
        Question(
            asked["question"],
            (asked["answer"],),
            tuple(dict.fromkeys(f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"])),
        )
        for asked in content
    ]
