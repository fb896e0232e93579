"""Questions over retrieved documents, answered with the numbers of the documents that show it.

    planted   own documents, two of which have to be joined (who made a thing, and in which room the maker works), among
              three other such pairs; needs no file
    musique   MuSiQue (arXiv:2108.00573), two to four documents to join; `musique=FILE` with its rows
    passages  questions with passages, of which nothing says which are needed: {"question", "answers", "ctxs"};
              `passages=FILE`; the answer alone is scored

What a question needs always stays. Other documents of its row, then those of other questions, fill the prompt until it
is as long as wanted; their order is random.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting
from kvfold.bench.workloads.files import FileWorkload, Row, read_rows
from kvfold.bench.workloads.metrics import bag_f1, token_f1
from kvfold.bench.workloads.rag_documents import asked, documents_of, filled, planted
from kvfold.bench.workloads.registry import workload

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
    tasks: ClassVar[tuple[str, ...]] = ("musique", "passages", "planted")

    def lacks(self, task: str) -> str:
        return "" if task == "planted" or self._file(task) else f"{task}=FILE, a JSON list of rows or one row a line"

    def rows(self, task: str) -> Sequence[Row] | None:
        path = self._file(task)
        return None if path is None else [row for row in read_rows(Path(path)) if row.get("answerable", True)]

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        if task == "planted":
            return planted(setting, index, random)
        row = self.row(setting, task, index)
        others = [other for other in self.rows(task) or () if other is not row]
        foreign = [document for other in others for document in documents_of(other, task)]
        return filled(setting, asked(row, task, index), documents_of(row, task), foreign, random)

    def score(self, sample: Sample, reply: str) -> float:
        if sample.task == "passages":
            return answer_f1(sample, reply)
        return (answer_f1(sample, reply) + citation_f1(sample, reply)) / 2

    def oracle(self, sample: Sample) -> str:
        return " ".join([sample.answers[0], *(f"[{number}]" for number in _needed(sample))])

    def _file(self, task: str) -> Path | None:
        return {"musique": self.musique, "passages": self.passages}.get(task)


def answer_f1(sample: Sample, reply: str) -> float:
    """Token F1 of the first line without its citations, against the best of the answers."""
    lines = _CITATION.sub(" ", reply).strip().splitlines()
    return max(token_f1(lines[0], answer) for answer in sample.answers) if lines else 0.0


def citation_f1(sample: Sample, reply: str) -> float:
    """F1 of the numbers in square brackets, each counted once, against those of the documents that are needed."""
    cited = {number for group in _CITATION.findall(reply) for number in re.findall(r"\d+", group)}
    return bag_f1(sorted(cited), [str(number) for number in _needed(sample)])


def _needed(sample: Sample) -> tuple[int, ...]:
    numbers = sample.facts["needed"]
    assert isinstance(numbers, tuple)
    return numbers
