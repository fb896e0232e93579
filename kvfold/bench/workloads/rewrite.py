"""Long input, long output: a text is to be written again with small corrections, and its facts have to survive.

Copying shows what needles do not: every part of the context is needed, one after the other, while the cache fills with
the reply. Eight sentences need an edit and eight state a fact that must stay, in turns, at even depths:

    rename    one person's name is to be replaced by another
    spelling  misspelt words are to be corrected
    redact    telephone numbers are to be replaced by [removed]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, NamedTuple

from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.fill import Planted, Text, fit, scatter, spread
from kvfold.bench.workloads.words import NOUNS, numbers

NUM_EDITS = 8
_SLACK = 1.1  # room for a reply that is a little longer than the text
_SPARE_TOKENS = 32
_INTRODUCTION = "Here is a text.\n\n"
_FACT = "Crate {number} weighs {weight} pounds and is marked {mark}."
_NAMES = ("Berenike", "Casimir", "Eudoxia", "Leopold", "Ottilie", "Philomena", "Theodora", "Wenzel")
_MISSPELT = (
    ("Parcel {number} was recieved in good order.", "recieved", "received"),
    ("Parcel {number} went to a seperate room.", "seperate", "separate"),
    ("It is definately parcel {number} that was opened.", "definately", "definitely"),
    ("Parcel {number} came at the begining of the week.", "begining", "beginning"),
    ("The label of parcel {number} was writen by hand.", "writen", "written"),
    ("Parcel {number} was sent to the wrong adress.", "adress", "address"),
    ("Nobody knew untill noon where parcel {number} was.", "untill", "until"),
    ("The string around parcel {number} was neccessary.", "neccessary", "necessary"),
)


class Edit(NamedTuple):
    before: str
    after: str


class Job(NamedTuple):
    """What to do in words, and the sentences it is to be done to."""

    instruction: str
    edits: tuple[Edit, ...]


@workload
@dataclass(frozen=True)
class Rewrite(Workload):
    name: ClassVar[str] = "rewrite"
    summary: ClassVar[str] = "a long text written again with small corrections"
    source: ClassVar[str] = "own"
    metric: ClassVar[str] = "share of edits done times share of facts kept, each a whole sentence"
    differences: ClassVar[str] = "none; sentences of filler are not scored"
    tasks: ClassVar[tuple[str, ...]] = ("redact", "rename", "spelling")

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        number = numbers(random, 4)
        job = _JOBS[task](number, random)
        kept = tuple(
            _FACT.format(number=next(number), weight=random.randint(11, 99), mark=random.choice(NOUNS))
            for _ in job.edits
        )
        filler = Text(setting.haystack(random))
        question = f"\n\nWrite the whole text again. {job.instruction} Change nothing else, and add nothing."

        def make(count: int) -> Sample:
            before, after = (_document(version, kept, filler.take(count)) for version in zip(*job.edits, strict=True))
            facts = {"edits": tuple(edit.after for edit in job.edits), "kept": kept}
            return Sample(task, index, f"{_INTRODUCTION}{before}", question, (after,), 0, "", facts, len(_INTRODUCTION))

        found = fit(setting, make)
        budget = int(setting.count_tokens(found.answers[0]) * _SLACK) + _SPARE_TOKENS
        return replace(found, max_new_tokens=budget)

    def score(self, sample: Sample, reply: str) -> float:
        return share(sample, "edits", reply) * share(sample, "kept", reply)


def share(sample: Sample, which: str, reply: str) -> float:
    """The share of "edits" or "kept" sentences that stand in the reply, however its lines are broken."""
    wanted = sample.listed(which)
    text = " ".join(reply.split())
    return sum(sentence in text for sentence in wanted) / len(wanted)


def _document(edited: Sequence[str], kept: Sequence[str], sentences: Sequence[str]) -> str:
    """Edited and kept sentences in turns, at even depths."""
    texts = [text for pair in zip(edited, kept, strict=True) for text in pair]
    planted = [Planted(spread(place, len(texts)), text) for place, text in enumerate(texts)]
    return " ".join(scatter(planted, sentences))


def _rename(number: Iterator[str], random: Random) -> Job:
    old, new = random.sample(_NAMES, 2)
    pattern = "{name} signed for parcel {number}."
    found = [next(number) for _ in range(NUM_EDITS)]
    edits = (Edit(pattern.format(name=old, number=each), pattern.format(name=new, number=each)) for each in found)
    return Job(f"Write {new} wherever the text says {old}.", tuple(edits))


def _spelling(number: Iterator[str], random: Random) -> Job:
    edits = list[Edit]()
    for pattern, wrong, right in random.sample(_MISSPELT, NUM_EDITS):
        before = pattern.format(number=next(number))
        edits.append(Edit(before, before.replace(wrong, right)))
    return Job("Correct the misspelt words.", tuple(edits))


def _redact(number: Iterator[str], random: Random) -> Job:
    edits = list[Edit]()
    for _ in range(NUM_EDITS):
        start, telephone = f"Parcel {next(number)} was announced from telephone", f"555 {next(number)}"
        edits.append(Edit(f"{start} {telephone}.", f"{start} [removed]."))
    return Job("Replace every telephone number by [removed].", tuple(edits))


_JOBS: dict[str, Callable[[Iterator[str], Random], Job]] = {"redact": _redact, "rename": _rename, "spelling": _spelling}
