"""Prompts that are read through a store, and what a lookup then finds."""

from __future__ import annotations

from kvfold.models.loader import Model
from kvfold.store import Prefixes, PrefixStore
from kvfold.testing.prefix_reuse import Read, prefill_reusing
from tests.store.common import CHUNK, make_prefixes, make_runner
from tests.tiny import prompt

TOKENS = prompt(5 * CHUNK + 7)
LONG = prompt(200, seed=2)


def read(prefixes: Prefixes, model: Model, tokens: list[int] = TOKENS, markers: list[int] | None = None) -> Read:
    return prefill_reusing(make_runner(model), prefixes, tokens, markers=markers)


def generated(model: Model, found: Read, num_new: int = 12) -> list[int]:
    """Greedy tokens; the sequence is released."""
    runner, tokens, logits_V = make_runner(model), [], found.logits_V
    for _ in range(num_new):
        tokens.append(int(logits_V.argmax()))
        logits_V = runner.decode([found.sequence], tokens[-1:])[0]
    found.sequence.release()
    return tokens


def stored(store: PrefixStore, model: Model, tenant: str = "") -> None:
    read(make_prefixes(store, model, tenant=tenant), model).sequence.release()
    assert store.flush()


def matched(store: PrefixStore, model: Model, policy: str = "full", tenant: str = "") -> int:
    hit = make_prefixes(store, model, policy, tenant=tenant).lookup(TOKENS)
    hit.sequence.release()
    return hit.matched_tokens
