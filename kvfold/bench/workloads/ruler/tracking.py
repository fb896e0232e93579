"""RULER's variable tracking: one value handed through five variables in lines of noise, after one worked example."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from kvfold.bench.workloads.base import Sample, Setting
from kvfold.bench.workloads.fill import fit
from kvfold.bench.workloads.noise import lines

_MAX_NEW_TOKENS = 30
_NUM_HOPS = 4
_NAME_LENGTH = 5
_EXAMPLE_NAME_LENGTH = 3
_EXAMPLE_TOKENS = 500
_INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"


def vt(setting: Setting, task: str, index: int, random: Random) -> Sample:
    solved = _tracking(replace(setting, length=_EXAMPLE_TOKENS), task, index, random, _EXAMPLE_NAME_LENGTH)
    example = f"{solved.context}{solved.question} {solved.reply_prefix} {' '.join(solved.answers)}\n\n"
    return _tracking(setting, task, index, random, _NAME_LENGTH, before=example)


def _tracking(setting: Setting, task: str, index: int, random: Random, name_length: int, *, before: str = "") -> Sample:
    names, value = _names(name_length, random), str(random.randrange(10_000, 99_999))
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {name} = VAR {source}" for source, name in pairwise(names)]
    depths = sorted(random.random() for _ in statements)
    hidden = list(zip(depths, statements, strict=True))
    question = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    begun = (
        f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assigned the value {value}, they are:"
    )

    def make(count: int) -> Sample:
        context = before + _INSTRUCTION + lines(hidden, count)
        return Sample(task, index, context, question, names, _MAX_NEW_TOKENS, begun, {"hops": _NUM_HOPS})

    return fit(setting, make)


def _names(length: int, random: Random) -> tuple[str, ...]:
    """Distinct variables, one more than there are hops."""
    found: dict[str, None] = {}
    while len(found) <= _NUM_HOPS:
        found["".join(random.choices(ascii_uppercase, k=length))] = None
    return tuple(found)
