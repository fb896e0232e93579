"""RULER (arXiv:2404.06654): thirteen tasks of retrieval, tracing, counting and questions, at any length.

Parameters, wording and scores are those of its published configuration:

    niah_single_1 … niah_multiquery   needles among noise, prose or other needles      128 new tokens
    vt                                one chain of five variables in noise, one example 30
    cwe, fwe                          the ten or three most frequent words              120, 50
    qa_1, qa_2                        SQuAD or HotpotQA questions among other documents 32
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.metrics import match_all, match_part
from kvfold.bench.workloads.ruler.documents import Corpus, qa, read_hotpot, read_squad
from kvfold.bench.workloads.ruler.synthetic import NEEDLES, cwe, fwe, niah, vt

_OTHERS = {"vt": vt, "cwe": cwe, "fwe": fwe}


@workload
@dataclass(frozen=True)
class Ruler(Workload):
    """`squad` is a JSON file in SQuAD's format, for qa_1; `hotpot` one in HotpotQA's, for qa_2."""

    squad: Path | None = None
    hotpot: Path | None = None

    name: ClassVar[str] = "ruler"
    summary: ClassVar[str] = "retrieval, tracing, counting and questions over long contexts"
    source: ClassVar[str] = "RULER, arXiv:2404.06654"
    metric: ClassVar[str] = "share of the answers that occur in the reply; qa: 1 if any does"
    differences: ClassVar[str] = (
        "the length leaves out the new tokens and is met to the nearest unit; prose is the run's haystack; keys and "
        "words come from kvfold's own list, and cwe goes on with pairs of words where single ones run out; every "
        "sample is shuffled anew; qa never repeats a document"
    )
    tasks: ClassVar[tuple[str, ...]] = (*NEEDLES, *_OTHERS, "qa_1", "qa_2")

    def lacks(self, task: str) -> str:
        needed = {"qa_1": (self.squad, "squad=FILE, a JSON file in SQuAD's format")}
        needed["qa_2"] = (self.hotpot, "hotpot=FILE, a JSON file in HotpotQA's format")
        given, what = needed.get(task, (Path(), ""))
        return what if given is None else ""

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        if task in NEEDLES:
            return niah(setting, task, index, random)
        if task in _OTHERS:
            return _OTHERS[task](setting, task, index, random)
        return qa(self._corpus(task), setting, task, index, random)

    def score(self, sample: Sample, reply: str) -> float:
        return (match_part if sample.task.startswith("qa_") else match_all)(sample.answers, reply)

    def _corpus(self, task: str) -> Corpus:
        path, read = (self.squad, read_squad) if task == "qa_1" else (self.hotpot, read_hotpot)
        assert path is not None  # refused by `lacks`
        return read(Path(path))
