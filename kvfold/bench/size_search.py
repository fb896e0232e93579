"""The search for one size: candidates are asked for, their bytes are told, until one fills the budget.

Bytes are nearly a straight line in slots, and its slope, a slot of every head, is known before anything is read. So a
search begins near its end, and two or three candidates are usual. Where all heads keep equally many, bytes stay the
same up to the end of a page and rise by a page of every head there: a page's end and the slot behind it tell at once
that nothing lies between them. Heads of different lengths end their pages one by one, and bytes rise smoothly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from kvfold.compress.round import CompressionRound
from kvfold.compress.view import size_facts
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, SizeError
from kvfold.models.check import check_policy
from kvfold.pages.page_config import PageConfig
from kvfold.policy.policy import Policy
from kvfold.policy.size import Ratio, exact, number_text

_HALVED_FROM = 3  # rounds after which the middle is asked for too: lines may mislead
Steps = Generator[list[str], list[int], "Matched"]  # yields policies to be measured, is sent their bytes


@dataclass(frozen=True)
class Matched:
    """A policy with its size, and what it really takes after the prompt beside what it was allowed."""

    policy: str
    achieved_bytes: int
    target_bytes: int
    full_bytes: int  # of the ordinary bf16 cache

    @property
    def share(self) -> float:
        """Achieved, of the full cache."""
        return self.achieved_bytes / self.full_bytes


@dataclass(frozen=True)
class Guess:
    """A policy with a size that served elsewhere: it is taken if its bytes lie between these, both included."""

    policy: str
    least_bytes: int
    most_bytes: int


@dataclass(frozen=True)
class _Line:
    """What is known of a policy's bytes before anything is read."""

    first: int  # slots that fit if every head had a page of padding
    slot_bytes: float  # of a slot in every head
    page_size: int
    open_len: int
    is_even: bool  # heads keep equally many

    def page_end(self, slots: int) -> int:
        """The most slots, up to so many, that fill their pages."""
        return slots - (slots - self.open_len) % self.page_size


@dataclass(frozen=True)
class Search:
    """One policy, one budget, one prompt. A size is good enough if it takes `enough_bytes`."""

    runner: Runner
    policy: str
    target_bytes: int
    enough_bytes: int
    full_bytes: int
    tokens: Sequence[int]
    config: PageConfig | None
    guess: Guess | None = None

    @property
    def slack_bytes(self) -> int:
        """That may be left."""
        return self.target_bytes - self.enough_bytes

    def whole(self) -> Steps:
        """All slots stay: it fits or it does not."""
        (found,) = yield from self._measured([self.policy])
        return self._fitting(found, "keeps every slot")

    def sized(self) -> Steps:
        """The largest size that fits, or one that is good enough."""
        ends = _Ends(self)
        if self.guess is not None and self._can_hold(slots := slots_of(self.guess.policy, len(self.tokens))):
            (found,) = yield from self._measured([self.guess.policy])
            if self.guess.least_bytes <= found.achieved_bytes <= self.guess.most_bytes:
                return found
            ends.note([slots], [found])
        while not ends.met:
            slots_asked = ends.candidates()
            ends.note(slots_asked, (yield from self._measured([self._with_size(slots) for slots in slots_asked])))
        if ends.fitting is None:
            assert ends.above is not None
            return self._fitting(ends.above, "has the smallest possible size")
        return ends.fitting

    def _with_size(self, slots: int) -> str:
        return f"{self.policy} + {ratio_text(slots, len(self.tokens))}"

    def _measured(self, policies: list[str]) -> Generator[list[str], list[int], list[Matched]]:
        found = yield policies
        return [Matched(*pair, self.target_bytes, self.full_bytes) for pair in zip(policies, found, strict=True)]

    @cached_property
    def line(self) -> _Line:
        sequence = self.runner.new_sequence(checked(self.runner, self._with_size(len(self.tokens))), self.config)
        try:
            facts = size_facts(sequence, len(self.tokens))
            page_size = max(sequence.page_class(i).page_size for i in self.runner.spec.compressible_layers)
            slot_bytes = facts.bytes_per_slot * facts.num_heads
            first, is_even = facts.slots_in(self.target_bytes), sequence.policy.prefill.budget.is_even
            return _Line(first, slot_bytes, page_size, facts.open_len, is_even)
        finally:
            sequence.release()

    def held(self, slots: int) -> int:
        """So many slots, or the smallest size there is."""
        return slots if slots >= 1 and self._can_hold(slots) else self.least_slots

    @cached_property
    def least_slots(self) -> int:
        """The smallest target that protected slots and the open block fit into."""
        return 1 + bisect_left(range(1, len(self.tokens)), True, key=self._can_hold)

    def _can_hold(self, slots: int) -> bool:
        policy = checked(self.runner, self._with_size(slots))
        sequence = self.runner.new_sequence(policy, self.config)
        try:  # the size alone is checked here: nothing is read
            CompressionRound(sequence, policy.prefill, len(self.tokens))
        except SizeError:
            return False
        finally:
            sequence.release()
        return True

    def _fitting(self, found: Matched, why: str) -> Matched:
        if found.achieved_bytes <= self.target_bytes:
            return found
        least = math.ceil(1000 * found.share) / 1000  # rounded up, so that it does fit
        raise SizeError(
            f'policy "{found.policy}" {why} and takes {found.achieved_bytes} bytes for {len(self.tokens)} tokens, '
            f"above the {self.target_bytes} of the budget; the smallest share of the full cache that it fits is {least}"
        )


class _Ends:
    """What has been measured on both sides of the budget: the most slots that fit, the fewest that do not."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.low, self.high = 0, len(search.tokens) + 1
        self.fitting: Matched | None = None
        self.above: Matched | None = None
        self._rounds = 0
        self._one_sided = 0  # rounds that found no more than one of the two

    @property
    def met(self) -> bool:
        """Whether there is nothing better, or nothing at all."""
        if self.fitting is None:
            return self.above is not None and self.high <= self.search.held(self.high - 1)
        return self.fitting.achieved_bytes >= self.search.enough_bytes or self.high - self.low <= 1

    def note(self, slots: Sequence[int], measured: Sequence[Matched]) -> None:
        """Candidates in ascending order."""
        for count, found in zip(slots, measured, strict=True):
            if found.achieved_bytes > found.target_bytes:
                self.high, self.above = count, found
                break
            self.low, self.fitting = count, found
        self._rounds += 1
        self._one_sided += not (self.fitting and self.above)

    def candidates(self) -> list[int]:
        """Ascending, one or more."""
        guess, line = self._guess(), self.search.line
        wanted = {guess}
        if self._looks_for_steps:
            end = line.page_end(guess)
            end += line.page_size if end <= self.low else 0
            wanted = {end, end + 1}
        elif self.search.slack_bytes == 0:
            wanted = {guess, guess + 1}
        if self._rounds >= _HALVED_FROM and self.fitting and self.above:
            wanted.add((self.low + self.high) // 2)
        return sorted({self._inside(count) for count in wanted})

    @property
    def _looks_for_steps(self) -> bool:
        """Whether bytes rise by more than a search may leave, and where."""
        line = self.search.line
        return line.is_even and line.page_size * line.slot_bytes > self.search.slack_bytes

    def _guess(self) -> int:
        """Where the line through what is known meets the middle of what is good enough."""
        line, aim = self.search.line, self.search.target_bytes - self.search.slack_bytes / 2
        if self.fitting is not None and self.above is not None:
            rise = (self.above.achieved_bytes - self.fitting.achieved_bytes) / (self.high - self.low)
            return self.low + math.floor((aim - self.fitting.achieved_bytes) / rise)
        further = 1 << max(0, self._one_sided - 1)
        if self.fitting is not None:
            return self.low + further * math.ceil((aim - self.fitting.achieved_bytes) / line.slot_bytes)
        if self.above is not None:
            return self.high - further * math.ceil((self.above.achieved_bytes - aim) / line.slot_bytes)
        if self._looks_for_steps:
            return line.first + line.page_size - 1  # the last page fits whole
        return line.first + line.page_size // 2 - math.floor(self.search.slack_bytes / 2 / line.slot_bytes)

    def _inside(self, slots: int) -> int:
        """The nearest that there is strictly between the ends."""
        return self.search.held(min(max(slots, self.low + 1), self.high - 1))


def ratio_text(slots: int, num_tokens: int) -> str:
    """The shortest `…x` that keeps so many of N tokens: ceil(N / x) = slots for N/slots <= x < N/(slots - 1)."""
    least, digits = Fraction(num_tokens, slots), 0
    while True:
        times = Fraction(math.ceil(least * 10**digits), 10**digits)
        if math.ceil(num_tokens / times) == slots:
            return f"{number_text(float(times))}x"
        digits += 1


def slots_of(policy: str, num_tokens: int) -> int:
    """The slots per head that a policy with such a size keeps of N tokens."""
    size = Policy.parse(policy).prefill.size
    if not isinstance(size, Ratio):
        raise InputError(f'policy "{policy}" has no size such as 7.4x; this is what a search begins with')
    return math.ceil(num_tokens / exact(size.times))


def checked(runner: Runner, text: str) -> Policy:
    policy = Policy.parse(text)
    check_policy(policy, runner.spec)
    return policy
