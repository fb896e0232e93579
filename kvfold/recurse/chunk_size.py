"""How many tokens of the text one call reads: what is left of the trained window, if the arena holds that much.

min(trained window - prefix - question and reply,  most tokens whose compressed cache fits the arena)
"""

from __future__ import annotations

from collections.abc import Callable

from kvfold.compression.view import size_facts
from kvfold.engine.scheduling.kv_bounds import KVBounds
from kvfold.errors import InputError, OutOfPages
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

_LEAST = 32  # tokens of the text in a call: below that, sentences are cut
_UNKNOWN_WINDOW = 4096  # tokens, where a model does not tell its own
_SPARE = 16  # tokens: a part tokenized behind a prefix may have a few more than alone


def window_tokens(max_positions: int, num_around: int, name: str = "the model") -> int:
    """What a window leaves beside so many tokens of prefix, question and reply. InputError if that is next to none."""
    window = max_positions or _UNKNOWN_WINDOW
    room = window - num_around - _SPARE
    if room < _LEAST:
        raise InputError(
            f"prefix, question and reply take {num_around} tokens of the window of {name}, which has {window} and so "
            "too few for the text; use a model with a longer window or extend it (--rope), ask a shorter question, or "
            "allow fewer tokens of a reply (max_new_tokens)"
        )
    return room


def memory_tokens(needed: Callable[[int], int], free_bytes: int, most: int) -> int:
    """The most tokens of a text, up to `most`, whose call fits into the free bytes, of which it needs so many;
    OutOfPages if that is next to none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= free_bytes else (low, middle - 1)
    if low < min(_LEAST, most):
        raise OutOfPages(
            f"a call with {_LEAST} tokens of text needs more KV-cache memory than is free; {OutOfPages.ADVICE}"
        )
    return low


def call_bytes(bounds: KVBounds, sample: SequenceCache, policy: Policy, num_tokens: int) -> int:
    """KV-cache bytes of a call of so many tokens in all: compressed, or as a replay holds them before."""
    size = policy.prefill.size
    replays = any(term.needs.replay is not None for term in (policy.prefill.score, policy.prefill.evicted))
    if size is None or replays:
        return bounds.prefill_bytes(num_tokens)
    slots = min(num_tokens, size.slots_per_head(size_facts(sample, num_tokens)))
    return min(bounds.prefill_bytes(num_tokens), bounds.kv_bytes(slots))
