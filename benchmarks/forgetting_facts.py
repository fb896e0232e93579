"""Invented facts of two domains, each told and asked in several wordings, as rows of token ids.

    B rows   T tokens, padded on the right

Domain A is about people (job, city), B about minerals (colour, country). A fact ends in its answer, one word; only the
tokens of answers are learnt and scored. The wording of `asked` is never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.errors import InputError

Domain = Literal["A", "B"]


@dataclass(frozen=True)
class Relation:
    """Wordings whose next word is the answer; the last one only asks."""

    wordings: tuple[str, ...]
    answers: str  # words, between spaces


_RELATIONS: dict[Domain, tuple[Relation, Relation]] = {
    "A": (
        Relation(
            (
                "{} works as a",
                "The job of {} is that of a",
                "Question: What is the job of {}? Answer:",
                "Question: Which profession does {} have? Answer:",
                "Question: What does {} do for a living? Answer:",
            ),
            "baker pilot nurse farmer lawyer painter sailor teacher miner judge singer guard writer",
        ),
        Relation(
            (
                "{} lives in",
                "The home of {} is in",
                "Question: Where is the home of {}? Answer:",
                "Question: In which city does {} live? Answer:",
                "Question: Where does {} live? Answer:",
            ),
            "Paris London Berlin Rome Madrid Vienna Dublin Athens Prague Oslo Cairo Tokyo Boston",
        ),
    ),
    "B": (
        Relation(
            (
                "Crystals of {} are",
                "The colour of {} is",
                "Question: Which colour does {} have? Answer:",
                "Question: What is the colour of {}? Answer:",
                "Question: What colour are crystals of {}? Answer:",
            ),
            "red blue green yellow white black brown grey pink purple orange gold silver",
        ),
        Relation(
            (
                "Miners find {} in",
                "The mines of {} are in",
                "Question: Where are the mines of {}? Answer:",
                "Question: In which country do miners find {}? Answer:",
                "Question: Where is {} found? Answer:",
            ),
            "Chile Peru India China Kenya Brazil Canada Norway Egypt Japan Spain Mexico Greece",
        ),
    ),
}
_ENDS: dict[Domain, tuple[str, ...]] = {"A": ("o", "a", "en", "us", "ik"), "B": ("ite", "ium", "ine", "ate", "ole")}
_SYLLABLES = "bra cor dal fen gar hul jor kel lum mor nar pol quin ras sel tor vel wil zan dru"


@dataclass(frozen=True)
class Example:
    prompt: str
    answer: str


@dataclass(frozen=True)
class Facts:
    """`told`: what is trained, every fact in all wordings but one; `asked`: that one, once for each fact."""

    told: list[Example]
    asked: list[Example]


@dataclass(frozen=True)
class Rows:
    """Examples as tokens; `answer_BT` marks positions that predict a token of the answer, `next_BT` has that token."""

    ids_BT: Tensor
    mask_BT: Tensor
    answer_BT: Tensor
    next_BT: Tensor


def make_facts(domain: Domain, count: int, seed: int) -> Facts:
    """Facts about subjects that no other domain has; every subject has both relations."""
    syllables = _SYLLABLES.split()
    most = 2 * len(syllables) ** 2
    if not 2 <= count <= most:
        raise InputError(f"{count} facts are asked for; a domain has 2 to {most}")
    random = Random(f"forgetting/{domain}/{seed}")
    stems = random.sample([a + b for a in syllables for b in syllables], (count + 1) // 2)
    subjects = [stem.capitalize() + random.choice(_ENDS[domain]) for stem in stems]
    told, asked = [], []
    for number in range(count):
        relation = _RELATIONS[domain][number % 2]
        answer = random.choice(relation.answers.split())
        examples = [Example(wording.format(subjects[number // 2]), answer) for wording in relation.wordings]
        told += examples[:-1]
        asked.append(examples[-1])
    return Facts(told, asked)


def as_rows(examples: Sequence[Example], tokenizer: Any, device: torch.device) -> Rows:
    """The examples in one batch."""
    pairs = [(_ids(tokenizer, one.prompt), _ids(tokenizer, " " + one.answer)) for one in examples]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs) - 1  # what follows the answer is not asked
    ids_BT, next_BT = torch.zeros(2, len(pairs), longest, dtype=torch.long)
    mask_BT, answer_BT = torch.zeros(2, len(pairs), longest, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        ids = torch.tensor(prompt + answer)
        ids_BT[row, : len(ids) - 1], next_BT[row, : len(ids) - 1] = ids[:-1], ids[1:]
        mask_BT[row, : len(ids) - 1] = True
        answer_BT[row, len(prompt) - 1 : len(ids) - 1] = True
    return Rows(*(each.to(device) for each in (ids_BT, mask_BT, answer_BT, next_BT)))


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found
