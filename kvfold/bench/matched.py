"""Budgets matched in bytes: the size at which a policy's cache, as it is held after a prompt, fits a share of the full.

`8x` compares slots, and slots differ in bytes: codes, scales, positions, padding of pages, mass that is kept. The size
`12.5%mem` turns bytes into slots before anything is read. It reserves a page of padding for every head and a whole
superblock, and knows neither codec states nor sliding layers nor the mass a first prompt will leave, so it lands under
or over its share. Here the bytes of candidates are measured instead: one forward serves several (`prefill_many`), and
bisection between one that fits and one that does not ends at two neighbours; three to six forwards are usual. Bytes
grow in steps: what remains of a budget is less than a page per head, rounded up to superblocks, and one superblock.
Several policies and shares search side by side: what they ask for next is measured in the same forward.

The answer is a ratio such as `7.4x`, which leaves decoded tokens alone; a number of tokens would bound them too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction

import torch

from kvfold.bench.room import in_room
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, OutOfPages, PolicyError, SizeError
from kvfold.models.check import check_policy
from kvfold.pages.compress import Compression
from kvfold.pages.sequence import PageConfig
from kvfold.policy.policy import Policy
from kvfold.policy.size import number_text

_REACH = 16  # slots to both sides of a guess: a page as a rule
_Steps = Generator[list[str], list[int], "Matched"]  # yields policies to be measured, is sent their bytes


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


def match(
    runner: Runner, policy: str, share: float, tokens: Sequence[int], *, config: PageConfig | None = None
) -> Matched:
    """The largest size of `policy`, given without one, whose cache of these tokens fits `share` of the full cache.

    A policy that evicts nothing, such as int4, is returned as it is if it fits. SizeError names the smallest share
    that can be had.
    """
    (found,) = match_many(runner, [(policy, share)], tokens, config=config)
    if isinstance(found, SizeError):
        raise found
    return found


def match_many(
    runner: Runner,
    wanted: Sequence[tuple[str, float]],
    tokens: Sequence[int],
    *,
    slack: float = 0.0,
    config: PageConfig | None = None,
) -> list[Matched | SizeError]:
    """`match` for several (policy, share) at once; the error takes the place of what cannot be had.

    With slack a search is content with a size that leaves no more than that share of its budget unused.
    """
    searches = [_search(runner, policy, share, tokens, slack, config) for policy, share in wanted]
    steps = [search.whole() if evicts_nothing(search.policy) else search.sized() for search in searches]
    found: dict[int, Matched | SizeError] = {}
    asked = {index: next(step) for index, step in enumerate(steps)}
    expected = dict.fromkeys(asked, runner.spec.full_bytes(len(tokens)))  # a search begins with the whole cache
    while asked:
        texts = {text: expected[index] for index, each in asked.items() for text in each}
        num_bytes = {
            text: count
            for part in in_room(list(texts), texts.__getitem__, runner.arena)
            for text, count in zip(part, _resident_in_parts(runner, part, tokens, config), strict=True)
        }
        expected = {index: search.target_bytes for index, search in enumerate(searches)}
        answered, asked = asked, {}
        for index, each in answered.items():
            try:
                asked[index] = steps[index].send([num_bytes[text] for text in each])
            except StopIteration as end:
                found[index] = end.value
            except SizeError as error:
                found[index] = error
    return [found[index] for index in range(len(wanted))]


def resident_bytes(
    runner: Runner, policies: Iterable[str], tokens: Sequence[int], *, config: PageConfig | None = None
) -> list[int]:
    """What the cache of each policy holds after one prompt; one forward serves all."""
    with ExitStack() as held:
        sequences = []
        for text in policies:
            sequences.append(runner.new_sequence(_checked(runner, text), config))
            held.callback(sequences[-1].release)
        runner.prefill_many(sequences, tokens)
        return [sequence.resident_bytes for sequence in sequences]


def evicts_nothing(policy: str) -> bool:
    """Whether a policy stands without a size; one that already has a size is refused."""
    if has_own_size(policy):
        raise PolicyError(f'policy "{policy}" has a size of its own; leave it out, it is what is looked for')
    return not needs_size(policy)


def has_own_size(policy: str) -> bool:
    """Whether a policy evicts as it is written: it names a size, or decides on one."""
    if needs_size(policy):
        return False
    parsed = Policy.parse(policy)
    return parsed.prefill.evicts or parsed.decode.evicts


def needs_size(policy: str) -> bool:
    """Whether a policy cannot run as it is written."""
    try:
        Policy.parse(policy)
    except PolicyError:
        Policy.parse(f"{policy} + 1x")  # what is wrong with more than the size is said here
        return True
    return False


def ratio_text(slots: int, num_tokens: int) -> str:
    """The shortest `…x` that keeps so many of N tokens: ceil(N / x) = slots for N/slots <= x < N/(slots - 1)."""
    least, digits = Fraction(num_tokens, slots), 0
    while True:
        times = Fraction(math.ceil(least * 10**digits), 10**digits)
        if math.ceil(num_tokens / times) == slots:
            return f"{number_text(float(times))}x"
        digits += 1


def _resident_in_parts(
    runner: Runner, policies: Sequence[str], tokens: Sequence[int], config: PageConfig | None
) -> list[int]:
    """As many in one forward as memory holds."""
    try:
        return resident_bytes(runner, policies, tokens, config=config)
    except (OutOfPages, torch.OutOfMemoryError):
        if len(policies) == 1:
            raise
    half = len(policies) // 2
    parts = (policies[:half], policies[half:])
    return [count for part in parts for count in _resident_in_parts(runner, part, tokens, config)]


def _search(
    runner: Runner, policy: str, share: float, tokens: Sequence[int], slack: float, config: PageConfig | None
) -> _Search:
    if not 0 < share <= 1:
        raise InputError(f"the budget is {share} of the full cache; a share is above 0 and at most 1, such as 0.125")
    full_bytes = runner.spec.full_bytes(len(tokens))
    target_bytes = math.floor(share * full_bytes)
    return _Search(runner, policy, target_bytes, math.ceil((1 - slack) * target_bytes), full_bytes, tokens, config)


@dataclass(frozen=True)
class _Search:
    """One policy, one budget, one prompt."""

    runner: Runner
    policy: str
    target_bytes: int
    enough_bytes: int
    full_bytes: int
    tokens: Sequence[int]
    config: PageConfig | None

    def whole(self) -> _Steps:
        """All slots stay: it fits or it does not."""
        (found,) = yield from self._measured([self.policy])
        return self._fitting(found, "keeps every slot")

    def sized(self) -> _Steps:
        """Between the smallest size there is and one that keeps everything."""
        low, high = self._least_slots(), len(self.tokens)
        smallest, largest = yield from self._sized([low, high])
        self._fitting(smallest, "has the smallest possible size")
        if largest.achieved_bytes <= self.target_bytes:
            return largest
        return (yield from self._between(low, smallest, high, largest))

    def _between(self, low: int, fitting: Matched, high: int, above: Matched) -> _Steps:
        """Bytes are close to linear in slots but for steps of pages: candidates surround the straight line's guess."""
        while high - low > 1 and fitting.achieved_bytes < self.enough_bytes:
            slope = (above.achieved_bytes - fitting.achieved_bytes) / (high - low)
            guess = low + math.floor((self.target_bytes - fitting.achieved_bytes) / slope)
            slots = _candidates(guess, low, high)
            measured = yield from self._sized(slots)
            for count, found in zip(slots, measured, strict=True):
                if found.achieved_bytes > self.target_bytes:
                    high, above = count, found
                    break
                low, fitting = count, found
        return fitting

    def _sized(self, slots: Sequence[int]) -> Generator[list[str], list[int], list[Matched]]:
        return (yield from self._measured([self._with_size(count) for count in slots]))

    def _with_size(self, slots: int) -> str:
        return f"{self.policy} + {ratio_text(slots, len(self.tokens))}"

    def _measured(self, policies: list[str]) -> Generator[list[str], list[int], list[Matched]]:
        found = yield policies
        return [Matched(*pair, self.target_bytes, self.full_bytes) for pair in zip(policies, found, strict=True)]

    def _least_slots(self) -> int:
        """The smallest target that protected slots and the open block fit into."""
        return 1 + bisect_left(range(1, len(self.tokens)), True, key=self._can_hold)

    def _can_hold(self, slots: int) -> bool:
        policy = _checked(self.runner, self._with_size(slots))
        sequence = self.runner.new_sequence(policy, self.config)
        try:  # the size alone is checked here: nothing is read
            Compression(sequence, policy.prefill, len(self.tokens))
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


def _candidates(guess: int, low: int, high: int) -> list[int]:
    """Ascending numbers of slots strictly between low and high, the middle always among them."""
    reach = min(_REACH, (high - low) // 4)
    wanted = {guess - reach, guess, guess + reach, (low + high) // 2}
    return sorted(count for count in wanted if low < count < high)


def _checked(runner: Runner, text: str) -> Policy:
    policy = Policy.parse(text)
    check_policy(policy, runner.spec)
    return policy
