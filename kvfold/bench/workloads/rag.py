"""Questions over retrieved documents, answered with the numbers of the documents that show it.

    planted   own documents, two of which have to be joined (who made a thing, and in which room the maker works), among
              three other such pairs; needs no file
    planted_0 the same in documents of equal length, all of them needed; in `planted_50` half of the documents, and in
              `planted_90` 90 % of them are distractors, in which the other pairs stand
    musique   MuSiQue (arXiv:2108.00573), two to four documents to join; `musique=FILE` with its rows
    passages  questions with passages, of which nothing says which are needed: {"question", "answers", "ctxs"};
              `passages=FILE`; the answer alone is scored

What a question needs always stays. Other documents of its row, then those of other questions, fill the prompt until it
is as long as wanted; their order is random.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import ClassVar, NamedTuple

from kvfold.bench.haystack import WORDS
from kvfold.bench.workloads.base import Sample, Setting, workload
from kvfold.bench.workloads.files import FileWorkload, Row, read_rows, want
from kvfold.bench.workloads.fill import Text, fit
from kvfold.bench.workloads.metrics import bag_f1, token_f1
from kvfold.bench.workloads.words import numbers, pairs

_CITATION = re.compile(r"\[([\d\s,;]+)\]")


@workload
@dataclass(frozen=True)
class Rag(FileWorkload):
    musique: Path | None = None
    passages: Path | None = None

    name: ClassVar[str] = "rag"
    summary: ClassVar[str] = "questions that join facts of several documents, answered with citations"
    source: ClassVar[str] = "MuSiQue (arXiv:2108.00573); citations after ALCE (arXiv:2305.14627)"
    metric: ClassVar[str] = "mean of the answer's token F1 and the F1 of cited documents; passages: the former alone"
    differences: ClassVar[str] = (
        "documents of other questions fill the prompt; citations are compared with the documents marked as needed, "
        "where ALCE asks a model; unanswerable questions are left out"
    )
    tasks: ClassVar[tuple[str, ...]] = ("musique", "passages", "planted", "planted_0", "planted_50", "planted_90")

    def lacks(self, task: str) -> str:
        if task.startswith("planted") or self._file(task):
            return ""
        return f"{task}=FILE, a JSON list of rows or one row a line"

    def rows(self, task: str) -> Sequence[Row] | None:
        path = self._file(task)
        return None if path is None else [row for row in read_rows(Path(path)) if row.get("answerable", True)]

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        if task.startswith("planted"):
            return planted(setting, task, index, random)
        row = self.row(setting, task, index)
        others = [other for other in self.rows(task) or () if other is not row]
        foreign = [document for other in others for document in documents_of(other, task)]
        return filled(setting, asked(row, task, index), documents_of(row, task), foreign, random)

    def score(self, sample: Sample, reply: str) -> float:
        if sample.task == "passages":
            return answer_f1(sample, reply)
        return (answer_f1(sample, reply) + citation_f1(sample, reply)) / 2

    def oracle(self, sample: Sample) -> str:
        return " ".join([sample.answers[0], *(f"[{number}]" for number in sample.listed("needed"))])

    def _file(self, task: str) -> Path | None:
        return {"musique": self.musique, "passages": self.passages}.get(task)


def answer_f1(sample: Sample, reply: str) -> float:
    """Token F1 of the first line without its citations, against the best of the answers."""
    lines = _CITATION.sub(" ", reply).strip().splitlines()
    return max(token_f1(lines[0], answer) for answer in sample.answers) if lines else 0.0


def citation_f1(sample: Sample, reply: str) -> float:
    """F1 of the numbers in square brackets, each counted once, against those of the documents that are needed."""
    cited = {number for group in _CITATION.findall(reply) for number in re.findall(r"\d+", group)}
    return bag_f1(sorted(cited), [str(number) for number in sample.listed("needed")])


_NEW_TOKENS = 48
_NUM_PAIRS = 4  # of planted makers and rooms; the first is asked about
_NUM_NEEDED = 2
_DISTRACTORS = {"planted_0": 0.0, "planted_50": 0.5, "planted_90": 0.9}  # of the documents
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


def planted(setting: Setting, task: str, index: int, random: Random) -> Sample:
    """Sentences of filler in documents, eight of which hold one planted sentence each; with a share of distractors,
    both sentences of the answer have a document of their own, and the others share the distractors."""
    things, rooms = list(islice(pairs(random), _NUM_PAIRS)), list(islice(numbers(random, 4), _NUM_PAIRS))
    makers = random.sample(WORDS["name"], _NUM_PAIRS)
    made = [f"The {thing} was made by {maker}." for thing, maker in zip(things, makers, strict=True)]
    works = [f"{maker} works in room {room}." for maker, room in zip(makers, rooms, strict=True)]
    sentences = [*made, *works]
    places = random.sample(range(len(sentences)), len(sentences))  # sentence i stands in the places[i]th part
    filler = Text(setting.haystack(random))
    query = f"In which room does the maker of the {things[0]} work?"
    facts = {"distractors": _DISTRACTORS[task]} if task in _DISTRACTORS else {}
    sample = Sample(task, index, "", f"\n\n{query} {_CITED}", (rooms[0],), _NEW_TOKENS, "", facts, query=query)
    chosen = _holders(_DISTRACTORS[task], random) if task in _DISTRACTORS else {}

    def make(count: int) -> Sample:
        parts = _parts(filler.take(count), _num_documents(_DISTRACTORS[task]) if chosen else None)
        holders = chosen or {i: place * len(parts) // len(sentences) for i, place in enumerate(places)}
        for number, holder in holders.items():
            parts[holder].insert(len(parts[holder]) // 2, sentences[number])
        needed = (holders[0], holders[_NUM_PAIRS])
        return _with(sample, [Document(" ".join(part), i in needed) for i, part in enumerate(parts)])

    return fit(setting, make, least=2 * _NUM_PAIRS)


def _num_documents(distractors: float) -> int:
    return round(_NUM_NEEDED / (1 - distractors))


def _holders(distractors: float, random: Random) -> dict[int, int]:
    """The document of every planted sentence; without distractors other pairs are left out."""
    first, second, *others = random.sample(range(_num_documents(distractors)), _num_documents(distractors))
    wrong = [number for number in range(2 * _NUM_PAIRS) if number % _NUM_PAIRS]
    spread = {number: others[place % len(others)] for place, number in enumerate(wrong)} if others else {}
    return {0: first, _NUM_PAIRS: second, **spread}


def _parts(sentences: Sequence[str], count: int | None = None) -> list[list[str]]:
    """So many documents; by default of about six sentences, and enough that no two planted sentences share one."""
    count = count or max(2 * _NUM_PAIRS, len(sentences) // _SENTENCES_PER_DOCUMENT)
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
    return Sample(task, index, "", question, tuple(answers), _NEW_TOKENS, facts=facts, query=row["question"])


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
    return replace(sample, context=_INTRODUCTION + text, facts=facts, num_instruction_chars=len(_INTRODUCTION))


def _titled(title: str, text: str) -> str:
    return f"{title}. {text}" if title else text
