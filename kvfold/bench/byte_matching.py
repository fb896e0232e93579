"""Byte-matched budgets: the largest size at which a policy's resident bytes fit a share of the full cache.

`8x` compares slots, and slots differ in bytes: codes, scales, positions, page padding, observer state. The size
`12.5%mem` converts bytes to slots before the prefill. It reserves a page of padding per head and one superblock, and
ignores codec states, sliding layers and observer state, so it lands under or over its share. Here the bytes of
candidates are measured instead (size_search.py): one forward serves several (`prefill_many`), and two or three are
usual. Bytes grow in steps: the unused rest of a budget is less than a page per head, rounded up to superblocks, and one
superblock. Several policies and shares are searched at once: their next candidates are measured in the same forward,
and measurements are shared.

The result is a ratio such as `7.4x`, which does not bound decoded tokens, as a number of tokens would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch

from kvfold.bench.batched_eval import fitting_batches
from kvfold.bench.size_search import Guess, Matched, SizeSearch, checked
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, OutOfPages, PolicyError, SizeError
from kvfold.pages.page_config import PageConfig
from kvfold.policy.policy import Policy


def match_many(
    runner: Runner,
    wanted: Sequence[tuple[str, float]],
    tokens: Sequence[int],
    *,
    slack: float = 0.0,
    config: PageConfig | None = None,
    guesses: Sequence[Guess | None] = (),
    num_original: int | None = None,
) -> list[Matched | SizeError]:
    """The largest size of each policy, given without one, whose cache of these tokens fits its share of the full cache.

    A policy that evicts nothing, such as int4, is returned as it is if it fits. A SizeError that names the smallest
    possible share takes the place of one that is impossible. With slack a search accepts a size that leaves at most
    that share of its budget unused. Guesses, one for each of the wanted if any, are tried first. `num_original`: tokens
    of the prompt before it was shortened to these, whose full cache shares are then of.
    """
    searches = [
        _search(runner, policy, share, tokens, slack, config, guess, num_original or len(tokens))
        for (policy, share), guess in zip(wanted, guesses or [None] * len(wanted), strict=True)
    ]
    is_unsized = [evicts_nothing(search.policy) for search in searches]
    steps = [
        search.unsized() if unsized else search.sized() for search, unsized in zip(searches, is_unsized, strict=True)
    ]
    found: dict[int, Matched | SizeError] = {}
    num_bytes: dict[str, int] = {}
    asked = {index: next(step) for index, step in enumerate(steps)}
    while asked:
        expected: dict[str, int] = {}
        for index, each in asked.items():
            likely = searches[index].full_bytes if is_unsized[index] else searches[index].target_bytes
            expected |= {text: likely for text in each if text not in num_bytes}
        for part in fitting_batches(list(expected), expected.__getitem__, runner.arena):
            num_bytes |= zip(part, _resident_in_parts(runner, part, tokens, config), strict=True)
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
    """Resident bytes of each policy after one prompt; one forward serves all."""
    with ExitStack() as held:
        sequences = []
        for text in policies:
            sequences.append(runner.new_sequence(checked(runner, text), config))
            held.callback(sequences[-1].release)
        runner.prefill_many(sequences, tokens)
        return [sequence.resident_bytes for sequence in sequences]


def evicts_nothing(policy: str) -> bool:
    """Whether a policy runs without a size; PolicyError if it already has one."""
    if has_own_size(policy):
        raise PolicyError(f'policy "{policy}" has a size of its own; leave it out, it is what is looked for')
    return not needs_size(policy)


def has_own_size(policy: str) -> bool:
    """Whether a policy keeps less as it is written: it shortens or has a size, or its score decides on one."""
    if needs_size(policy):
        return False
    parsed = Policy.parse(policy)
    return parsed.shorten is not None or parsed.prefill.evicts or parsed.decode.evicts


def needs_size(policy: str) -> bool:
    """Whether a policy cannot run without a size."""
    try:
        Policy.parse(policy)
    except PolicyError:
        Policy.parse(f"{policy} + 1x")  # raises for any other error
        return True
    return False


def _resident_in_parts(
    runner: Runner, policies: Sequence[str], tokens: Sequence[int], config: PageConfig | None
) -> list[int]:
    """Resident bytes, halving the batch when memory runs out."""
    try:
        return resident_bytes(runner, policies, tokens, config=config)
    except (OutOfPages, torch.OutOfMemoryError):
        if len(policies) == 1:
            raise
    half = len(policies) // 2
    parts = (policies[:half], policies[half:])
    return [count for part in parts for count in _resident_in_parts(runner, part, tokens, config)]


def _search(
    runner: Runner,
    policy: str,
    share: float,
    tokens: Sequence[int],
    slack: float,
    config: PageConfig | None,
    guess: Guess | None,
    num_original: int,
) -> SizeSearch:
    if not 0 < share <= 1:
        raise InputError(f"the budget is {share} of the full cache; a share is above 0 and at most 1, such as 0.125")
    full_bytes = runner.spec.full_bytes(num_original)
    target_bytes = math.floor(share * full_bytes)
    # With less than a superblock left, no larger size fits that takes more.
    left_bytes = max(math.floor(slack * target_bytes), runner.arena.superblock_bytes - 1) if slack else 0
    return SizeSearch(runner, policy, target_bytes, target_bytes - left_bytes, full_bytes, tokens, config, guess)
