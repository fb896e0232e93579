"""A log of conversations made from a seed, and questions about it that have one right value, or none.

current   stated once                      updated   the newest of several values
past      the value on a day of the past   ended     stated, and later said to hold no longer: no value
unknown   never stated of this subject, though of others: no value
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvfold.errors import InputError
from kvfold.memory.dates import day_text, parse_date
from kvfold.memory.evaluation.relations import DISTRACTORS, OTHERS, RELATIONS, STRANGERS, I, Relation, Subject

Kind = Literal["current", "updated", "past", "ended", "unknown"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_DAY = 86_400.0
_FIRST_DAY = parse_date("2026-01-05")
_SENTENCES_OF_A_TURN = 3


@dataclass(frozen=True)
class Turn:
    """What the user said at a time."""

    at: float
    text: str
    session: int


@dataclass(frozen=True)
class Question:
    """`answer` None: nothing in the log answers it. `at`: the day it asks for; None: today."""

    text: str
    kind: Kind
    answer: str | None
    others: tuple[str, ...]  # values of the relation that are wrong
    at: float | None = None


@dataclass(frozen=True)
class Log:
    """Turns in the order of time, and questions that come after them."""

    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]
    now: float

    @property
    def text(self) -> str:
        """All of it, a line for each turn with its date."""
        return "\n".join(f"[{day_text(turn.at)}] {turn.text}" for turn in self.turns)


@dataclass
class _History:
    """Values of one subject's relation: (session, value), None where it ended."""

    subject: Subject
    relation: Relation
    values: list[tuple[int, str | None]] = field(default_factory=list)


def make_log(
    num_facts: int = 60,
    num_sessions: int = 20,
    num_questions: int = 50,
    distractors: float = 2.0,
    seed: int = 0,
    *,
    is_free: bool = False,
) -> Log:
    """`num_facts` subjects' relations over sessions a week apart; half are updated, some end. `distractors` sentences
    beside each sentence that states something. `is_free`: in words that the rules of kvfold were not made for."""
    most = (len(OTHERS) + 1) * len(RELATIONS)
    if not 5 <= num_facts <= most - len(RELATIONS) or num_sessions < 4 or num_questions < 1 or distractors < 0:
        raise InputError(f"a log has 5 to {most - len(RELATIONS)} facts, 4 or more sessions, 1 or more questions")
    rng = random.Random(seed)
    pairs = [(subject, relation) for subject in (I, *OTHERS) for relation in RELATIONS]
    rng.shuffle(pairs)
    stated, unstated = pairs[:num_facts], pairs[num_facts:]
    histories = [_history(rng, *pair, num_sessions, number) for number, pair in enumerate(stated)]
    turns = _turns(rng, histories, num_sessions, distractors, is_free)
    now = _FIRST_DAY + 7 * _DAY * num_sessions
    questions = _questions(rng, histories, unstated, num_questions, num_sessions)
    return Log(tuple(turns), tuple(questions), now)


def _history(rng: random.Random, subject: Subject, relation: Relation, num_sessions: int, number: int) -> _History:
    """By turns: one value; two or three; one or two and an end."""
    found = _History(subject, relation)
    count = (1, rng.choice((2, 3)), rng.choice((1, 2)))[number % 3]
    ends = number % 3 == 2
    sessions = sorted(rng.sample(range(num_sessions), count + ends))
    values: list[str | None] = [*rng.sample(relation.values, count), *([None] if ends else [])]
    found.values = list(zip(sessions, values, strict=True))
    return found


def _turns(
    rng: random.Random, histories: list[_History], num_sessions: int, distractors: float, is_free: bool
) -> list[Turn]:
    said: list[list[str]] = [[] for _ in range(num_sessions)]
    for history in histories:
        before = None
        for number, (session, value) in enumerate(history.values):
            words = history.relation.free if is_free else history.relation.plain
            forms = words.ended if value is None else words.updated if number else words.stated
            said[session].append(_filled(rng.choice(forms), history.subject, value or before))
            before = value
    turns = []
    for session, sentences in enumerate(said):
        sentences += [_distractor(rng) for _ in range(round(distractors * max(1, len(sentences))))]
        rng.shuffle(sentences)
        at = _FIRST_DAY + 7 * _DAY * session + 9 * 3600
        while sentences:
            taken = [sentences.pop() for _ in range(min(len(sentences), rng.randint(1, _SENTENCES_OF_A_TURN)))]
            turns.append(Turn(at, " ".join(taken), session))
            at += 60.0
    return turns


def _filled(form: str, subject: Subject, value: str | None = None, date: str = "") -> str:
    text = form.format(S=subject.S, P=subject.P, s=subject.s, do=subject.do, v=value, d=date)
    return text[0].upper() + text[1:]


def _distractor(rng: random.Random) -> str:
    values = {relation.name: rng.choice(relation.values) for relation in RELATIONS}
    return rng.choice(DISTRACTORS).format(S=rng.choice(OTHERS).S, **values)


def _questions(
    rng: random.Random,
    histories: list[_History],
    unstated: list[tuple[Subject, Relation]],
    count: int,
    num_sessions: int,
) -> list[Question]:
    unknown = [*unstated, *((subject, rng.choice(RELATIONS)) for subject in STRANGERS)]
    rng.shuffle(unknown)
    pools: dict[Kind, list[Question]] = {
        "current": [_now(rng, one, "current") for one in histories if len(one.values) == 1],
        "updated": [_now(rng, one, "updated") for one in histories if len(one.values) > 1 and one.values[-1][1]],
        "past": [_past(rng, one) for one in histories if len(one.values) > 1],
        "ended": [_now(rng, one, "ended") for one in histories if one.values[-1][1] is None],
        "unknown": [_now(rng, _History(*pair), "unknown") for pair in unknown],
    }
    found: list[Question] = []
    while len(found) < count and any(pools.values()):
        found += [pools[kind].pop(rng.randrange(len(pools[kind]))) for kind in KINDS if pools[kind]]
    return found[:count]


def _now(rng: random.Random, history: _History, kind: Kind) -> Question:
    answer = history.values[-1][1] if history.values else None
    text = _filled(rng.choice(history.relation.asked), history.subject)
    return Question(text, kind, answer, _others(history.relation, answer))


def _past(rng: random.Random, history: _History) -> Question:
    """A day between a value and the next."""
    number = rng.randrange(len(history.values) - 1)
    (session, value), (next_session, _) = history.values[number : number + 2]
    day = _FIRST_DAY + _DAY * rng.randint(7 * session + 1, 7 * next_session - 1)
    text = _filled(rng.choice(history.relation.asked_of_the_past), history.subject, date=day_text(day))
    return Question(text, "past", value, _others(history.relation, value), day)


def _others(relation: Relation, answer: str | None) -> tuple[str, ...]:
    return tuple(value for value in relation.values if value != answer)
