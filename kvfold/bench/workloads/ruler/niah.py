"""RULER's eight needle tasks: what is hidden, how often, and among what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

from kvfold.bench.workloads.base import Sample, Setting
from kvfold.bench.workloads.fill import Supply, Text, fit
from kvfold.bench.workloads.magic import Magic
from kvfold.bench.workloads.noise import insert, lines
from kvfold.bench.workloads.words import numbers, pairs, uuids

_MAX_NEW_TOKENS = 128
_DEPTHS = tuple(step / 39 for step in range(40))
_DRAW: dict[str, Callable[[Random], Iterator[str]]] = {"words": pairs, "numbers": numbers, "uuids": uuids}
Units = Callable[[int], str]


@dataclass(frozen=True)
class Needles:
    """Among noise, prose, or other needles; `asked` of the keys are asked for."""

    among: Literal["noise", "prose", "needles"]
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    asked: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("prose"),
    "niah_single_3": Needles("prose", values="uuids"),
    "niah_multikey_1": Needles("prose", num_keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("prose", num_values=4),
    "niah_multiquery": Needles("prose", num_keys=4, asked=4),
}


def niah(setting: Setting, task: str, index: int, random: Random) -> Sample:
    kind = NEEDLES[task]
    keys, values = _DRAW[kind.keys](random), _DRAW[kind.values](random)
    found = {key: tuple(islice(values, kind.num_values)) for key in islice(keys, kind.num_keys)}
    asked = tuple(random.sample(list(found), kind.asked))
    answers = tuple(value for key in asked for value in found[key])
    magic = Magic(kind.values, asked, len(answers))
    needles = [magic.sentence(key, value) for key, held in found.items() for value in held]
    depths = _depths(kind, len(needles), random)
    depth = depths[needles.index(magic.sentence(asked[0], answers[0]))]
    facts = {"depth": round(depth, 2), "needles": len(needles)}  # of the first needle asked for
    others = (magic.sentence(key, value) for key, value in zip(keys, values, strict=True))
    body = _body(kind, list(zip(depths, needles, strict=True)), others, setting.haystack(random))

    def make(count: int) -> Sample:
        context = magic.instruction + body(count)
        return Sample(task, index, context, magic.question, answers, _MAX_NEW_TOKENS, magic.begun, facts)

    return fit(setting, make)


def _depths(kind: Needles, count: int, random: Random) -> list[float]:
    """Prose: forty even steps, each once. Lines: anywhere."""
    return random.sample(_DEPTHS, count) if kind.among == "prose" else [random.random() for _ in range(count)]


def _body(kind: Needles, hidden: list[tuple[float, str]], others: Iterator[str], prose: Iterator[str]) -> Units:
    """The text of so many words of prose, or lines of anything else."""
    if kind.among == "noise":
        return lambda count: lines(hidden, count)
    if kind.among == "needles":
        supply = Supply(others)
        return lambda count: insert(hidden, supply.take(count), "\n")
    text = Text(prose)
    return lambda count: insert(hidden, text.take(count), " ")
