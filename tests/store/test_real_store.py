"""A store over a real model: the same tokens from every tier, with and without compression."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.engine.runner import Runner
from kvfold.pages.sequence import SequenceCache
from kvfold.store import DeviceTier, DiskTier, HostTier, PrefixStore
from kvfold.testing.prefix_reuse import prefill_reusing

pytestmark = pytest.mark.model

CHUNK = 64
TEXT = (
    "The harbour of Lindholm has three piers. The northern pier belongs to the fishermen, the middle one to the ferry, "
    "and the southern one to nobody. Every morning at six the ferry leaves for the islands with mail, milk and guests. "
)


@pytest.mark.parametrize("policy", ["full", "keydiff + 2x + int8"])
def test_every_tier_gives_the_same_tokens(smollm2: kvfold.Model, policy: str, tmp_path: Path) -> None:
    runner = Runner(smollm2.hf, smollm2.spec, smollm2.arena, chunk_len=CHUNK)
    tokens = smollm2.tokenizer(TEXT * 3 + "The southern pier belongs to")["input_ids"]
    marker, found = len(tokens) - 8, []
    for device, tiers in ((None, [None, "host"]), (DeviceTier(1 << 28), ["disk", "device"])):
        with PrefixStore([HostTier(1 << 28), DiskTier(tmp_path, 1 << 28)], device=device, chunk_len=CHUNK) as store:
            prefixes = store.prefixes(smollm2, policy, prefill_len=CHUNK)
            for tier in tiers:
                read = prefill_reusing(runner, prefixes, tokens, markers=[marker])
                assert read.tier == tier and read.matched_tokens == (0 if tier is None else read.saved_tokens)
                store.flush()
                found.append((read.logits_V, _generated(runner, read.sequence, read.logits_V)))
    assert len({tuple(tokens) for _, tokens in found}) == 1
    if policy == "full":
        assert all(torch.equal(logits, found[0][0]) for logits, _ in found)


def _generated(runner: Runner, sequence: SequenceCache, logits_V: torch.Tensor) -> list[int]:
    tokens: list[int] = []
    for _ in range(8):
        tokens.append(int(logits_V.argmax()))
        logits_V = runner.decode([sequence], tokens[-1:])[0]
    sequence.release()
    return tokens
