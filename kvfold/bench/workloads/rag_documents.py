"""Documents of the `rag` workload: planted among filler, or read from rows, and put together to a given length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from random import Random
from typing import NamedTuple

from kvfold.bench.prose import WORDS
from kvfold.bench.workloads.base import Sample, Setting
from kvfold.bench.workloads.files import Row, want
from kvfold.bench.workloads.fill import Text, fit
from kvfold.bench.workloads.words import numbers, pairs

_NEW_TOKENS = 48
_NUM_PAIRS = 4  # of planted makers and rooms; the first is asked about
_SENTENCES_PER_DOCUMENT = 6
_INTRODUCTION = "Answer a question from the following documents.\n\n"
_SHORT = "Answer with a few words and no sentence"
_CITED = (
    f"{_SHORT}, then give the number of every document that is needed to know it, in square brackets, as in: "
    "blue whale [2] [7]"
)


class Document(NamedTuple):
    text: str
    needed: bool = False  # a right answer cites it
    stays: bool = False  # whatever the length


def planted(setting: Setting, index: int, random: Random) -> Sample:
    """Sentences of filler in documents, eight of which hold one planted sentence each."""
    things, rooms = list(islice(pairs(random), _NUM_PAIRS)), list(islice(numbers(random, 4), _NUM_PAIRS))
    makers = random.sample(WORDS["name"], _NUM_PAIRS)
    made = [f"The {thing} was made by {maker}." for thing, maker in zip(things, makers, strict=True)]
    works = [f"{maker} works in room {room}." for maker, room in zip(makers, rooms, strict=True)]
    sentences = [*made, *works]
    places = random.sample(range(len(sentences)), len(sentences))  # sentence i stands in the places[i]th part
    filler = Text(setting.haystack(random))
    question = f"\n\nIn which room does the maker of the {things[0]} work? {_CITED}"
    sample = Sample("planted", index, "", question, (rooms[0],), _NEW_TOKENS)

    def make(count: int) -> Sample:
        parts = _parts(filler.take(count))
        holders = [place * len(parts) // len(sentences) for place in places]
        for holder, sentence in zip(holders, sentences, strict=True):
            parts[holder].insert(len(parts[holder]) // 2, sentence)
        needed = (holders[0], holders[_NUM_PAIRS])
        return _with(sample, [Document(" ".join(part), i in needed) for i, part in enumerate(parts)])

    return fit(setting, make, least=2 * _NUM_PAIRS)


def _parts(sentences: Sequence[str]) -> list[list[str]]:
    """Documents of about six sentences, and enough of them that no two planted sentences share one."""
    count = max(2 * _NUM_PAIRS, len(sentences) // _SENTENCES_PER_DOCUMENT)
    bounds = [part * len(sentences) // count for part in range(count + 1)]
    return [list(sentences[start:end]) for start, end in pairwise(bounds)]


def documents_of(row: Row, task: str) -> list[Document]:
    if task == "passages":
        want(row, "ctxs", where=task)
        return [Document(_titled(each["title"], each["text"]), stays=True) for each in row["ctxs"]]
    want(row, "paragraphs", where=task)
    marked = ((_titled(each["title"], each["paragraph_text"]), each["is_supporting"]) for each in row["paragraphs"])
    return [Document(text, needed, needed) for text, needed in marked]


def asked(row: Row, task: str, index: int) -> Sample:
    """The sample of a row, still without documents."""
    want(row, "question", "answers" if task == "passages" else "answer", where=task)
    answers = row["answers"] if task == "passages" else [row["answer"], *row.get("answer_aliases", ())]
    question = f"\n\n{row['question']} {_SHORT + '.' if task == 'passages' else _CITED}"
    facts = {"hops": len(row.get("question_decomposition", ()))}
    return Sample(task, index, "", question, tuple(answers), _NEW_TOKENS, facts=facts)


def filled(
    setting: Setting, sample: Sample, own: Sequence[Document], foreign: Sequence[Document], random: Random
) -> Sample:
    """The sample with what has to stay, and as many other documents as fit: its own first, then foreign ones."""
    stay = [document for document in own if document.stays]
    known = {document.text for document in own}
    texts = sorted({document.text for document in foreign} - known)
    spare = [document for document in own if not document.stays]
    spare += [Document(text) for text in random.sample(texts, len(texts))]
    # Each document has its place in a random order from the start, so one more only moves others on.
    order = {document.text: random.random() for document in [*stay, *spare]}

    def make(count: int) -> Sample:
        return _with(sample, sorted([*stay, *spare[:count]], key=lambda document: order[document.text]))

    return fit(setting, make, least=0, most=len(spare))


def _with(sample: Sample, documents: Sequence[Document]) -> Sample:
    text = "\n\n".join(f"Document [{number}]: {document.text}" for number, document in enumerate(documents, 1))
    needed = tuple(number for number, document in enumerate(documents, 1) if document.needed)
    facts = {**sample.facts, "documents": len(documents), "needed": needed}
    return replace(sample, context=_INTRODUCTION + text, facts=facts)


def _titled(title: str, text: str) -> str:
    return f"{title}. {text}" if title else text
