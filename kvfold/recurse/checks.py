"""Checks of what a model wrote: each says why a text is refused, or nothing.

QuoteCheck(text)     what stands in quotation marks is in the text
ArithmeticCheck()    equations such as `12 * 3 = 36` hold
AgreementCheck()     the model itself says yes rather than no, by log-probability
a function           of the text; returns a reason, or whether the text passes
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from kvfold.errors import InputError, ModelError
from kvfold.recurse.arithmetic import equations, number_text
from kvfold.session import Session
from kvfold.shortening.word_index import NO_SPACES
from kvfold.shortening.yes_no import yes_no_ids, yes_probabilities

_QUOTED = re.compile(
    r"“([^“”]*)”|\"([^\"]*)\"|«([^«»]*)»|„([^„“”]*)[“”]|「([^「」]*)」|『([^『』]*)』|‘([^‘]*?)’(?!\w)"
    r"|[“”„\"«»]([^“”„\"«»]*)[“”„\"«»]"
)
_LEFT_OUT = re.compile(r" ?(?:\[(?:…|\.\.\.)\]|…|\.\.\.) ?")
_SPELLED = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\u00a0": " "})
_END_MARKS = ".,;:!?"
_MAX_LEFT_OUT = 400  # characters of the text that one quote leaves out, about three sentences


class Check(ABC):
    """One required method; `name` stands in reports."""

    name: ClassVar[str]

    @abstractmethod
    def refusal(self, text: str, session: Session | None = None) -> str | None:
        """Why the text is refused, as a sentence; None if it passes. `session` ends with the text."""


@dataclass(frozen=True)
class QuoteCheck(Check):
    """Whatever stands in quotation marks and has `min_words` words or more must be in `source`, word for word.

    Whitespace, case, kinds of quotation marks and marks at both ends of the quote do not count. Parts around `…` stand
    in one passage, one behind the other, with at most 400 characters left out in all. What stands in '…' or in a mark
    that nothing closes is not checked. `required`: a text that quotes nothing is refused.
    """

    source: str
    min_words: int = 3
    required: bool = False
    name: ClassVar[str] = "quote"

    def refusal(self, text: str, session: Session | None = None) -> str | None:
        found = [quote for quote in quotes(text) if _num_words(quote) >= max(1, self.min_words)]
        if not found and self.required:
            return "it quotes nothing of the text"
        source = plain(self.source)
        wrong = next((quote for quote in found if not is_quoted(source, quote)), None)
        return None if wrong is None else f'"{wrong}" is not in the text'


def quotes(text: str) -> Iterator[str]:
    """What stands in quotation marks."""
    for found in _QUOTED.finditer(text):
        yield next(group for group in found.groups() if group is not None)


def _num_words(quote: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in quote.split())


def plain(text: str) -> str:
    """A text as quotes of it are compared: whitespace, case and spellings of marks do not count."""
    return " ".join(text.translate(_SPELLED).casefold().split())


def is_quoted(source: str, quote: str) -> bool:
    """Whether the parts of a quote stand in one passage of a `plain` text, in their order and in whole words."""
    said = (part.strip(f"{_END_MARKS} ") for part in _LEFT_OUT.split(plain(quote)))
    first, *others = [part for part in said if part] or [""]
    places = re.finditer(f"(?={_whole_words(first).pattern})", source)  # which may overlap
    return any(_follow(source, place.start() + len(first), others) for place in places)


def _follow(source: str, end: int, parts: Sequence[str]) -> bool:
    """Whether the parts come one behind the other from there on, and leave out little."""
    left = _MAX_LEFT_OUT
    for part in parts:
        most = end + left + len(part)
        found = _whole_words(part).search(source, end, most + 1)
        if found is None or found.end() > most:
            return False
        left, end = most - found.end(), found.end()
    return True


@lru_cache(maxsize=64)
def _whole_words(part: str) -> re.Pattern[str]:
    """A pattern of the part that neither begins nor ends inside of a word."""
    letter = rf"[^\W{NO_SPACES}]"  # Chinese and Japanese have no spaces that would end a word
    edge = rf"(?!(?<={letter}){letter})"
    return re.compile(f"{edge}{re.escape(part)}{edge}")


@dataclass(frozen=True)
class ArithmeticCheck(Check):
    """Every equation between numbers holds; a result with decimals may be rounded. `required`: there is one."""

    required: bool = False
    name: ClassVar[str] = "arithmetic"

    def refusal(self, text: str, session: Session | None = None) -> str | None:
        num_found = 0
        for equation in equations(text):
            num_found += 1
            if equation.value is None:
                return f"{equation} divides by zero"
            if not equation.is_right:
                expression = equation.left if equation.is_left_computed else equation.right
                return f"{equation} is wrong: {expression} is {number_text(equation.value)}"
        return "it computes nothing" if self.required and not num_found else None


@dataclass(frozen=True)
class AgreementCheck(Check):
    """The model is asked behind the text; p(yes) / (p(yes) + p(no)) of its next token is at least `threshold`."""

    question: str = "Is the last step right? Answer yes or no."
    threshold: float = 0.5
    name: ClassVar[str] = "agreement"

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise InputError(f"threshold is {self.threshold}; it is a probability above 0 and below 1")

    def refusal(self, text: str, session: Session | None = None) -> str | None:
        if session is None:
            raise InputError("AgreementCheck asks the model that wrote the text; use it in a Chain")
        probability = self.probability(session)
        if probability >= self.threshold:
            return None
        return f"the model agrees with a probability of {probability:.2f}, below {self.threshold:g}"

    def probability(self, session: Session) -> float:
        """Of yes against no, asked of a fork; the session stays as it is."""
        yes, no = yes_no_ids(session.model.tokenizer)
        if not yes or not no:
            raise ModelError(
                f"{session.model.name}: yes and no begin with the same token, so it cannot agree; use another check"
            )
        cue = "" if session.template is not None else "\nAnswer:"
        with session.fork() as branch:
            branch.extend(f"\n\n{self.question}{cue}", compress=False)
            return float(yes_probabilities(branch.next_logits().unsqueeze(0), yes, no)[0])


@dataclass(frozen=True)
class FunctionCheck(Check):
    """A user's function of the text: a string is the reason of a refusal, True or None passes, False refuses."""

    function: Callable[[str], str | bool | None]
    name: ClassVar[str] = "function"

    def refusal(self, text: str, session: Session | None = None) -> str | None:
        found = self.function(text)
        named = getattr(self.function, "__name__", "the function")
        if found is None or isinstance(found, str | bool):
            return found if isinstance(found, str) else f"{named} refused it" if found is False else None
        raise InputError(f"the check {named} returned {found!r}; return a reason (a string), True, False or None")


def as_checks(checks: Sequence[Check | Callable[[str], str | bool | None]]) -> list[Check]:
    """Functions become checks; InputError for what is neither."""
    if isinstance(checks, str) or not isinstance(checks, Sequence):
        raise InputError("checks are a list; write [ArithmeticCheck()], also for one")
    for check in checks:
        if not isinstance(check, Check) and (isinstance(check, type) or not callable(check)):
            raise InputError(f"{check!r} is no check; give one such as ArithmeticCheck(), or a function of the text")
    return [check if isinstance(check, Check) else FunctionCheck(check) for check in checks]
