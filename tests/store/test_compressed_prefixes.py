"""Prefixes that a policy has compressed: a hit is the sequence that was saved, where both are compressed alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.errors import InputError, PolicyError
from kvfold.models.loader import Model
from kvfold.store import DeviceTier, DiskTier, HostTier, PrefixStore
from tests.engine.runs import Shared
from tests.store.common import CHUNK, make_prefixes, positions
from tests.store.prefix_runs import LONG, generated, read

MARKER = 8 * CHUNK + 5
COMPRESSING = ["knorm + 2x", "keydiff + ada + 50tok + int8", "kvzip + 2x", "h2o + 60tok + int4", "full + int4"]
BOTH = [("llama", "full"), ("gemma3", "full"), *(("llama", policy) for policy in COMPRESSING)]


@pytest.mark.parametrize(("family", "policy"), BOTH)
@pytest.mark.parametrize("with_device", [False, True])
def test_a_snapshot_is_the_sequence_that_was_saved(shared: Shared, family: str, policy: str, with_device: bool) -> None:
    model = shared(family)
    device = DeviceTier(1 << 24) if with_device else None
    with PrefixStore([HostTier(1 << 24)], device=device, chunk_len=CHUNK) as store:
        prefixes = make_prefixes(store, model, policy)
        first = read(prefixes, model, LONG, [MARKER])
        store.flush()
        second = read(prefixes, model, LONG, [MARKER])
        assert second.matched_tokens == second.saved_tokens == MARKER
        assert second.tier == ("device" if with_device else "host")
        assert positions(first.sequence) == positions(second.sequence)
        torch.testing.assert_close(first.logits_V, second.logits_V, atol=1e-4, rtol=1e-4)
        assert generated(model, first, 12) == generated(model, second, 12)


def test_snapshots_are_found_without_markers_after_a_restart(model: Model, tmp_path: Path) -> None:
    for expected in (0, MARKER):
        with PrefixStore([HostTier(1 << 24), DiskTier(tmp_path, 1 << 24)], chunk_len=CHUNK) as store:
            prefixes = make_prefixes(store, model, "knorm + 2x + int8")
            hit = prefixes.lookup(LONG)
            assert hit.matched_tokens == expected
            hit.sequence.release()
            read(prefixes, model, LONG, [MARKER]).sequence.release()


def test_markers_are_asked_longest_first(model: Model, store: PrefixStore) -> None:
    """An entry at 100 serves a prompt with a marker at 150, if 100 is asked for too; not one that is compressed at 60
    before, which would keep something else."""
    prefixes = make_prefixes(store, model, "knorm + 50tok")
    read(prefixes, model, LONG, [100]).sequence.release()
    store.flush()
    for markers, expected in (([100, 150], 100), ([150], 0), ([150, 100, 60], 0)):
        hit = prefixes.lookup(LONG, markers=markers)
        hit.sequence.release()
        assert hit.matched_tokens == expected


def test_a_snapshot_serves_prompts_that_are_compressed_at_the_same_places(model: Model, store: PrefixStore) -> None:
    """What is kept of 100 tokens depends on whether they were compressed at 60, too: hit and cold are one run."""
    prefixes = make_prefixes(store, model, "knorm + 50tok")
    for markers in ([100], [60, 100], [60], None):
        cold = read(prefixes, model, LONG, markers)
        store.flush()
        again = read(prefixes, model, LONG, markers)
        assert (cold.matched_tokens, again.matched_tokens) == (60 if markers == [60] else 0, max(markers or [0]))
        torch.testing.assert_close(cold.logits_V, again.logits_V, atol=1e-4, rtol=1e-4)
        cold.sequence.release()
        again.sequence.release()


def test_what_was_compressed_is_saved_at_its_own_length_only(model: Model, store: PrefixStore) -> None:
    prefixes = make_prefixes(store, model, "knorm + 2x")
    found = read(prefixes, model, LONG)
    with pytest.raises(InputError, match="at its own length only"):
        prefixes.save(found.sequence, LONG, upto=40)
    assert prefixes.save(found.sequence, LONG) == len(LONG)
    found.sequence.release()


@pytest.mark.parametrize("policy", ["snapkv + 2x", "tova + 30tok", "prefill(snapkv + 2x) + decode(h2o + 60tok)"])
def test_scores_that_look_at_the_end_are_refused(model: Model, store: PrefixStore, policy: str) -> None:
    with pytest.raises(PolicyError, match="and a cached prefix is compressed before its question"):
        make_prefixes(store, model, policy)
