"""A long conversation in which small facts are told, and asked for many turns later.

    turns     each sample is a conversation of its own, with questions and answers in between; the last turn asks
    requests  eight samples share one conversation and ask for one fact each: compress it once, ask many times

The two modes are SCBench's (arXiv:2412.10319): in the second no question may be known when the context is compressed.
`turn_ends` among a sample's facts are the offsets in its context where turns end, for a runner that reads (and
compresses) turn by turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from random import Random
from typing import ClassVar, NamedTuple

from kvfold.bench.haystack import WORDS
from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.fill import Text, fit, spread
from kvfold.bench.workloads.words import numbers

NUM_FACTS = 8  # in a conversation, at even depths; as many requests share one
_SENTENCES_PER_TURN = 4  # three of the user, one of the assistant
_ASKED_AFTER = 0.25  # of the conversation, from telling a fact to asking for it in passing
_NEW_TOKENS = 16
_INTRODUCTION = "The following is a conversation between a user and an assistant.\n\n"
_THINGS = ("locker number", "door code", "customer number", "parking space", "membership number", "extension")


class Told(NamedTuple):
    """One fact, told in the turn at its depth."""

    depth: float
    owner: str
    thing: str
    value: str

    @property
    def sentence(self) -> str:
        return f"Please note that {self.what} is {self.value}."

    @property
    def what(self) -> str:
        return f"{self.owner}'s {self.thing}"


@workload
@dataclass(frozen=True)
class Chat(Workload):
    name: ClassVar[str] = "chat"
    summary: ClassVar[str] = "facts told in a conversation and asked for many turns later, once or many times"
    source: ClassVar[str] = "own; modes of SCBench (arXiv:2412.10319)"
    metric: ClassVar[str] = "1 if the first number of the reply is the one told"
    differences: ClassVar[str] = "SCBench asks about documents, this about what was said"
    tasks: ClassVar[tuple[str, ...]] = ("requests", "turns")

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        conversation, asked = divmod(index, NUM_FACTS)
        shared = task == "requests"
        if shared:  # all samples of a conversation have to draw the same one, of the same length
            random = Random(f"{setting.seed}/{self.name}/{task}/conversation/{conversation}")
        told = draw_facts(random)
        filler = Text(setting.haystack(random))
        fitted = 0 if shared else asked  # whose question the length is fitted with

        def make(count: int) -> Sample:
            turns = _turns(filler.take(count), told, () if shared else _passing(told, asked))
            return _ask(_talk(task, index, turns), told[fitted])

        return _ask(fit(setting, make), told[asked])

    def num_sharing(self, task: str) -> int:
        return NUM_FACTS if task == "requests" else 1

    def score(self, sample: Sample, reply: str) -> float:
        return float(re.findall(r"\d+", reply)[:1] == [sample.answers[0]])


def draw_facts(random: Random) -> list[Told]:
    """Facts at even depths; things recur with other owners, and owners with other things."""
    pairs = random.sample([(owner, thing) for owner in WORDS["name"] for thing in _THINGS], NUM_FACTS)
    values = islice(numbers(random, 4), NUM_FACTS)
    return [
        Told(spread(place, NUM_FACTS), owner, thing, value)
        for place, ((owner, thing), value) in enumerate(zip(pairs, values, strict=True))
    ]


def _passing(told: Sequence[Told], asked: int) -> list[Told]:
    """Every second fact is asked for in passing, a while after it was told; never the one that the sample asks for."""
    later = (fact._replace(depth=fact.depth + _ASKED_AFTER) for i, fact in enumerate(told) if i % 2 and i != asked)
    return [fact for fact in later if fact.depth < 1]


def _turns(sentences: Sequence[str], told: Sequence[Told], passing: Sequence[Told]) -> list[str]:
    """Sentences by turns, with facts before and questions after the turn at their depth."""
    starts = range(0, len(sentences), _SENTENCES_PER_TURN)
    turns = list[str]()
    for place, start in enumerate(starts):
        *said, reply = *sentences[start : start + _SENTENCES_PER_TURN - 1], "I see."
        if len(sentences) >= start + _SENTENCES_PER_TURN:
            reply = sentences[start + _SENTENCES_PER_TURN - 1]
        noted = [fact.sentence for fact in told if int(fact.depth * len(starts)) == place]
        turns.append(_turn(" ".join([*noted, *said]), reply))
        turns += [_turn(_question(f), f"It is {f.value}.") for f in passing if int(f.depth * len(starts)) == place]
    return turns


def _talk(task: str, index: int, turns: Sequence[str]) -> Sample:
    ends = tuple(accumulate((len(turn) for turn in turns), initial=len(_INTRODUCTION)))[1:]
    facts = {"turns": len(turns), "turn_ends": ends, "conversation": index // NUM_FACTS}
    return Sample(task, index, _INTRODUCTION + "".join(turns), "", (), _NEW_TOKENS, "", facts, len(_INTRODUCTION))


def _ask(talk: Sample, fact: Told) -> Sample:
    facts = {**talk.facts, "depth": fact.depth}
    question, reply_prefix = f"User: {_question(fact)}", f"{fact.what} is"
    return replace(talk, question=question, answers=(fact.value,), reply_prefix=reply_prefix, facts=facts)


def _turn(said: str, reply: str) -> str:
    return f"User: {said}\nAssistant: {reply}\n\n"


def _question(fact: Told) -> str:
    return f"What is {fact.what}?"
