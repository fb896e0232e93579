"""Reasoning that has to be written down and read back: chained arithmetic and variables, scattered through noise.

Arithmetic is what compression breaks first (arXiv:2502.01941), and a chain of thought is where a cache grows while it
is read. The statements of a chain stand in random order among filler; the reply has to write each step, then answer:

    chain     the value of the last variable
    readback  the first value plus the last, so the beginning of the scratch work is needed at its end
    track     every variable that holds one chain's value, among three chains (RULER's variable tracking has one)

Chains have 4, 8 or 16 steps, by turns. All arithmetic is modulo 97, so numbers stay short.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase
from typing import ClassVar, NamedTuple

from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.fill import Planted, Text, fit, scatter
from kvfold.bench.workloads.metrics import bag_f1
from kvfold.bench.workloads.words import codes

_MODULUS = 97
_NUM_STEPS = (4, 8, 16)
_NUM_CHAINS = 3
_TOKENS_PER_STEP = 24
_SPARE_TOKENS = 64
_NAME = re.compile(r"\b[A-Z]{4}\b")
_INTRODUCTION = "Statements about variables are scattered through the following text. Remember them.\n\n"
_HOW = "Write one line for each step, in order, as NAME = VALUE. Then write a last line that begins with Answer: and"


class Chain(NamedTuple):
    statements: tuple[str, ...]
    names: tuple[str, ...]
    values: tuple[int, ...]

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(f"{name} = {value}" for name, value in zip(self.names, self.values, strict=True))


@workload
@dataclass(frozen=True)
class ChainOfThought(Workload):
    name: ClassVar[str] = "cot"
    summary: ClassVar[str] = "arithmetic and variables in many steps, written down and read back"
    source: ClassVar[str] = (
        "own; after KVFundaBench (arXiv:2502.01941) and RULER's variable tracking (arXiv:2404.06654)"
    )
    metric: ClassVar[str] = "1 if the number after the last Answer: is right; track: F1 of the variables named there"
    differences: ClassVar[str] = "RULER has one chain of four hops, no written steps, and counts names anywhere"
    tasks: ClassVar[tuple[str, ...]] = ("chain", "readback", "track")

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        num_steps = _NUM_STEPS[index % len(_NUM_STEPS)]
        num_chains = _NUM_CHAINS if task == "track" else 1
        names = codes(random, ascii_uppercase, 4, num_chains * num_steps)
        draw = _copies if task == "track" else _sums
        chains = [draw(names[start::num_chains], random) for start in range(num_chains)]
        if task == "track":
            chains = _distinct(chains, random)
        question, answers = _ask(task, chains[0])
        statements = [text for chain in chains for text in chain.statements]
        planted = [Planted(random.random(), text) for text in statements]
        filler = Text(setting.haystack(random))
        facts = {"num_steps": num_steps, "steps": chains[0].steps}
        budget = num_steps * _TOKENS_PER_STEP + _SPARE_TOKENS

        def make(count: int) -> Sample:
            context = _INTRODUCTION + " ".join(scatter(planted, filler.take(count)))
            return Sample(task, index, context, question, answers, budget, "", facts, len(_INTRODUCTION))

        return fit(setting, make)

    def score(self, sample: Sample, reply: str) -> float:
        final = final_answer(reply)
        if sample.task == "track":
            return bag_f1(sorted(set(_NAME.findall(final))), sorted(sample.answers))
        return float(re.findall(r"\d+", final)[-1:] == [sample.answers[0]])

    def oracle(self, sample: Sample) -> str:
        return "\n".join([*sample.listed("steps"), f"Answer: {', '.join(sample.answers)}"])


def final_answer(reply: str) -> str:
    """The line after the last "Answer:", or nothing."""
    _, found, rest = reply.rpartition("Answer:")
    lines = rest.strip().splitlines()
    return lines[0] if found and lines else ""


def _sums(names: Sequence[str], random: Random) -> Chain:
    values = [random.randrange(_MODULUS)]
    statements = [f"{names[0]} is {values[0]}."]
    for before, name in pairwise(names):
        sign, step = random.choice(("plus", "minus", "times")), random.randint(2, 9)
        value = {"plus": values[-1] + step, "minus": values[-1] - step, "times": values[-1] * step}[sign]
        values.append(value % _MODULUS)
        statements.append(f"{name} is {before} {sign} {step}, modulo {_MODULUS}.")
    return Chain(tuple(statements), tuple(names), tuple(values))


def _copies(names: Sequence[str], random: Random) -> Chain:
    value = random.randint(10_000, 99_999)
    statements = [f"{names[0]} is {value}.", *(f"{name} is the same as {before}." for before, name in pairwise(names))]
    return Chain(tuple(statements), tuple(names), (value,) * len(names))


def _distinct(chains: Sequence[Chain], random: Random) -> list[Chain]:
    """Chains of one value would be one answer: draw again until each has its own."""
    found = dict[int, Chain]()
    for chain in chains:
        while chain.values[0] in found:
            chain = _copies(chain.names, random)
        found[chain.values[0]] = chain
    return list(found.values())


def _ask(task: str, chain: Chain) -> tuple[str, tuple[str, ...]]:
    first, last = chain.names[0], chain.names[-1]
    if task == "chain":
        return f"\n\nWhat is the value of {last}? {_HOW} gives that value.", (str(chain.values[-1]),)
    if task == "readback":
        wish = f"gives the value of {first} plus the value of {last}, not reduced."
        return f"\n\nWork out {last} from {first} on. {_HOW} {wish}", (str(chain.values[0] + chain.values[-1]),)
    wish = "lists the names of all variables with this value."
    return f"\n\nWhich variables have the value {chain.values[0]}? {_HOW} {wish}", chain.names
