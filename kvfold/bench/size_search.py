"""Search for the largest size within a byte budget: candidates are yielded, their measured bytes are sent back.

Bytes are nearly linear in slots, and the slope, one slot in every head, is known before any prefill. So a search starts
near its end, and takes two or three candidates. Where all heads keep equally many slots, bytes are constant up to the
end of a page and rise by one page per head there: a page's end and the slot behind it show at once that no size lies
between them. With different lengths per head, bytes rise smoothly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from kvfold.compression.round import check_size
from kvfold.compression.view import size_facts
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, SizeError
from kvfold.models.check import check_policy
from kvfold.pages.page_config import PageConfig
from kvfold.policy.policy import Policy
from kvfold.policy.size import Ratio, exact, number_text

_HALVED_FROM = 3  # rounds after which the midpoint is measured too, in case the linear model is wrong
Steps = Generator[list[str], list[int], "Matched"]  # yields policies to be measured, is sent their bytes


@dataclass(frozen=True)
class Matched:
    """A policy with its size, its measured bytes after the prompt, and its budget."""

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
    """A sized policy from another prompt: accepted if its bytes lie between these, both included."""

    policy: str
    least_bytes: int
    most_bytes: int


@dataclass(frozen=True)
class _ByteModel:
    """The linear model of a policy's bytes, known before any prefill."""

    first: int  # slots that fit if every head had a page of padding
    slot_bytes: float  # of a slot in every head
    page_size: int
    open_len: int
    is_even: bool  # heads keep equally many

    def page_end(self, slots: int) -> int:
        """The largest number of slots, at most `slots`, that fills its pages."""
        return slots - (slots - self.open_len) % self.page_size


@dataclass(frozen=True)
class SizeSearch:
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
        """Bytes of the budget that may stay unused."""
        return self.target_bytes - self.enough_bytes

    def unsized(self) -> Steps:
        """For a policy that evicts nothing: it fits or it does not."""
        (found,) = yield from self._measured([self.policy])
        return self._fitting(found, "keeps every slot")

    def sized(self) -> Steps:
        """The largest size that fits, or one that is good enough."""
        bracket = _Bracket(self)
        if self.guess is not None and self._can_hold(slots := slots_of(self.guess.policy, len(self.tokens))):
            (found,) = yield from self._measured([self.guess.policy])
            if self.guess.least_bytes <= found.achieved_bytes <= self.guess.most_bytes:
                return found
            bracket.note([slots], [found])
        while not bracket.is_done:
            slots_asked = bracket.candidates()
            bracket.note(slots_asked, (yield from self._measured([self._with_size(slots) for slots in slots_asked])))
        if bracket.fitting is None:
            assert bracket.above is not None
            return self._fitting(bracket.above, "has the smallest possible size")
        return bracket.fitting

    def _with_size(self, slots: int) -> str:
        return f"{self.policy} + {ratio_text(slots, len(self.tokens))}"

    def _measured(self, policies: list[str]) -> Generator[list[str], list[int], list[Matched]]:
        found = yield policies
        return [Matched(*pair, self.target_bytes, self.full_bytes) for pair in zip(policies, found, strict=True)]

    @cached_property
    def byte_model(self) -> _ByteModel:
        sequence = self.runner.new_sequence(checked(self.runner, self._with_size(len(self.tokens))), self.config)
        try:
            facts = size_facts(sequence, len(self.tokens))
            page_size = max(sequence.page_class(i).page_size for i in self.runner.spec.compressible_layers)
            slot_bytes = facts.bytes_per_slot * facts.num_heads
            first, is_even = facts.slots_in(self.target_bytes), sequence.policy.prefill.budget.is_even
            return _ByteModel(first, slot_bytes, page_size, facts.open_len, is_even)
        finally:
            sequence.release()

    def feasible(self, slots: int) -> int:
        """So many slots, or the smallest possible size."""
        return slots if slots >= 1 and self._can_hold(slots) else self.least_slots

    @cached_property
    def least_slots(self) -> int:
        """The smallest target that protected slots and the open block fit into."""
        return 1 + bisect_left(range(1, len(self.tokens)), True, key=self._can_hold)

    def _can_hold(self, slots: int) -> bool:
        policy = checked(self.runner, self._with_size(slots))
        sequence = self.runner.new_sequence(policy, self.config)
        try:  # the size alone is checked here: nothing is read
            check_size(sequence, len(self.tokens))
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


class _Bracket:
    """The bracket of the search: the most slots measured to fit, the fewest measured not to."""

    def __init__(self, search: SizeSearch) -> None:
        self.search = search
        self.low, self.high = 0, len(search.tokens) + 1
        self.fitting: Matched | None = None
        self.above: Matched | None = None
        self._rounds = 0
        self._one_sided = 0  # rounds that found no more than one of the two

    @property
    def is_done(self) -> bool:
        """Whether no better size exists, or none at all."""
        if self.fitting is None:
            return self.above is not None and self.high <= self.search.feasible(self.high - 1)
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
        guess, model = self._guess(), self.search.byte_model
        wanted = {guess}
        if self._is_stepped:
            end = model.page_end(guess)
            end += model.page_size if end <= self.low else 0
            wanted = {end, end + 1}
        elif self.search.slack_bytes == 0:
            wanted = {guess, guess + 1}
        if self._rounds >= _HALVED_FROM and self.fitting and self.above:
            wanted.add((self.low + self.high) // 2)
        return sorted({self._inside(count) for count in wanted})

    @property
    def _is_stepped(self) -> bool:
        """Whether bytes rise in page steps larger than the slack."""
        model = self.search.byte_model
        return model.is_even and model.page_size * model.slot_bytes > self.search.slack_bytes

    def _guess(self) -> int:
        """Linear interpolation to the middle of the accepted range."""
        model, aim = self.search.byte_model, self.search.target_bytes - self.search.slack_bytes / 2
        if self.fitting is not None and self.above is not None:
            rise = (self.above.achieved_bytes - self.fitting.achieved_bytes) / (self.high - self.low)
            return self.low + math.floor((aim - self.fitting.achieved_bytes) / rise)
        further = 1 << max(0, self._one_sided - 1)
        if self.fitting is not None:
            return self.low + further * math.ceil((aim - self.fitting.achieved_bytes) / model.slot_bytes)
        if self.above is not None:
            return self.high - further * math.ceil((self.above.achieved_bytes - aim) / model.slot_bytes)
        if self._is_stepped:
            return model.first + model.page_size - 1  # the last page fits whole
        return model.first + model.page_size // 2 - math.floor(self.search.slack_bytes / 2 / model.slot_bytes)

    def _inside(self, slots: int) -> int:
        """The nearest feasible number of slots strictly inside the bracket."""
        return self.search.feasible(min(max(slots, self.low + 1), self.high - 1))


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
