"""Rules stated before a long text, which the answer to a question about the text has to obey.

Compression makes some instructions vanish while others stay (arXiv:2510.00231): a rule is only a few tokens, and
nothing in the question points back at it. As in IFEval (arXiv:2311.07911), every rule can be checked by code. Tasks
differ in how many rules there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.fill import Planted, Text, even_depth, fit, scatter
from kvfold.bench.workloads.words import NOUNS, numbers, pairs

NUM_RULES = {"one": 1, "three": 3, "five": 5}
_MOST_WORDS = 30
_NEW_TOKENS = 96


class Rule(NamedTuple):
    """A rule about a word, how to check it, and how to make a reply obey it."""

    text: str  # {word} is drawn for each sample
    obeyed: Callable[[str, str], bool]  # reply, word
    obey: Callable[[str, str], str] = lambda reply, word: reply


# In the order in which `obey` can be applied one after the other; any subset can be obeyed at once.
RULES = {
    "brackets": Rule(
        "Put the number you were asked for between double square brackets, and nothing else between them.",
        lambda reply, word: reply.count("[[") == 1 and reply.partition("[[")[2].partition("]]")[0].strip().isdigit(),
        lambda reply, word: f"[[{reply}]]",
    ),
    "mention": Rule(
        "Mention the word {word} exactly twice.",
        lambda reply, word: _words(reply).count(word) == 2,
        lambda reply, word: f"{word} {word} {reply}",
    ),
    "begin": Rule(
        "Begin with the words dear {word}.",
        lambda reply, word: _words(reply)[:2] == ["dear", word],
        lambda reply, word: f"dear {word} {reply}",
    ),
    "end": Rule(
        "End with the words farewell {word}.",
        lambda reply, word: _words(reply)[-2:] == ["farewell", word],
        lambda reply, word: f"{reply} farewell {word}",
    ),
    "commas": Rule("Do not use any comma.", lambda reply, word: "," not in reply),
    "lower": Rule("Do not use any capital letter.", lambda reply, word: reply == reply.lower()),
    "short": Rule(f"Use at most {_MOST_WORDS} words.", lambda reply, word: len(reply.split()) <= _MOST_WORDS),
    "lines": Rule(
        "Write exactly two lines.",
        lambda reply, word: len(reply.strip().splitlines()) == 2,
        lambda reply, word: reply.replace(" ", "\n", 1) if " " in reply else f"yes\n{reply}",
    ),
}


@workload
@dataclass(frozen=True)
class Instruct(Workload):
    name: ClassVar[str] = "instruct"
    summary: ClassVar[str] = "rules stated before a long text, to be obeyed in the answer to a question about it"
    source: ClassVar[str] = "own; after IFEval (arXiv:2311.07911) and arXiv:2510.00231"
    metric: ClassVar[str] = "share of checks passed, one per rule and one for the right number; 0 for an empty reply"
    differences: ClassVar[str] = "IFEval has no long text, more kinds of rules, and no question with a right answer"
    tasks: ClassVar[tuple[str, ...]] = tuple(NUM_RULES)

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        count = NUM_RULES[task]
        rules = tuple(zip(random.sample(list(RULES), count), random.sample(NOUNS, count), strict=True))
        thing, value, depth = next(pairs(random)), next(numbers(random)), even_depth(index)
        fact = Planted(depth, f"The number of the {thing} is {value}.")
        filler = Text(setting.haystack(random))
        question = f"\n\nWhat is the number of the {thing}?"
        facts = {"rules": rules, "num_rules": len(rules), "depth": depth}

        def make(count: int) -> Sample:
            instruction = _rules_text(rules)
            context = instruction + " ".join(scatter([fact], filler.take(count)))
            return Sample(task, index, context, question, (value,), _NEW_TOKENS, "", facts, len(instruction))

        return fit(setting, make)

    def score(self, sample: Sample, reply: str) -> float:
        passed = list(checks(sample, reply).values())
        return sum(passed) / len(passed) if reply.strip() else 0.0

    def oracle(self, sample: Sample) -> str:
        words = dict(sample.listed("rules"))
        reply = sample.answers[0]
        for name, rule in RULES.items():
            reply = rule.obey(reply, words[name]) if name in words else reply
        return reply


def checks(sample: Sample, reply: str) -> dict[str, bool]:
    """Each rule of the sample by name, and "answer": whether a reply passes."""
    found = {name: RULES[name].obeyed(reply, word) for name, word in sample.listed("rules")}
    return {**found, "answer": sample.answers[0] in reply}


def _rules_text(rules: Sequence[tuple[str, str]]) -> str:
    lines = [f"{place}. {RULES[name].text.format(word=word)}" for place, (name, word) in enumerate(rules, 1)]
    return "Every answer you give must obey these rules:\n" + "\n".join(lines) + "\n\nHere is a text.\n\n"


def _words(reply: str) -> list[str]:
    """Words in lower case, without punctuation around them."""
    return [word.strip(".,;:!?\"'*()[]").lower() for word in reply.split()]
