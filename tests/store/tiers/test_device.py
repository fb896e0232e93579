"""Prefixes in the arena: shared by reference, given up when memory is short, never lent for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvfold.errors import InputError, OutOfPages
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.store import DeviceTier, HostTier, PrefixStore
from kvfold.store.tiers.eviction import Lease
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.store.common import CHUNK, PAGES, Clock, cold_logits, finish, make_key, make_prefixes, make_runner
from tests.tiny import prompt, ready

TOKENS = prompt(4 * CHUNK + 1)
LEASE = Lease(Clock().now, 300.0, 1.0)


def filled(model: Model, num_chunks: int = 4) -> SequenceCache:
    runner = make_runner(model)
    sequence = runner.new_sequence(Policy.parse("full"), PAGES)
    runner.prefill([sequence], [TOKENS[: num_chunks * CHUNK]])
    return sequence


@pytest.fixture
def tier() -> Iterator[DeviceTier]:
    made = DeviceTier(1 << 24, clock=Clock())
    yield made
    made.close()


def test_its_own_length_is_shared_and_so_is_half_of_it(model: Model, tier: DeviceTier) -> None:
    sequence, keys = filled(model), [make_key(i, end=CHUNK * (i + 1)) for i in range(4)]
    assert tier.put_chunks(keys, sequence, LEASE)
    held = sequence.segments[0]
    sequence.release()
    assert held.refs == 1 and set(tier.keys()) == set(keys)
    found = tier.get(keys[3], LEASE.at)
    assert found is not None and found.segments == [held] and held.refs == 2
    half, less = tier.get(keys[1], LEASE.at), tier.get(keys[0], LEASE.at)
    assert half is not None and less is not None and less.segments == [], "less than half is copied"
    assert len(half.segments) == 1 and half.tail.num_bytes == 0 and held.refs == 3
    for one, length in ((half, 2 * CHUNK), (less, CHUNK)):
        assert one.positions(1, 1).tolist() == list(range(length)) and one.committed_len == length
        one.release()
    found.release()
    tier.delete(keys[0])  # of the sequence that serves it nothing is left
    assert list(tier.keys()) == [] and held.refs == 0 and tier.num_bytes == 0


def test_the_longest_common_prefix_is_found_to_the_page(model: Model, tier: DeviceTier) -> None:
    clock, key = Clock(), make_key(0, end=4 * CHUNK)
    tier = DeviceTier(1 << 24, clock=clock)
    sequence = filled(model)
    assert tier.put_chunks([key], sequence, LEASE, TOKENS)
    sequence.release()
    for num_same, length, expected in (
        (64, 65, 64),
        (64, 40, 40),
        (63, 65, 48),
        (48, 65, 48),
        (47, 47, 47),
        (15, 65, 0),
    ):
        tokens = [*TOKENS[:num_same], *((token + 1) % 90 for token in TOKENS[num_same:])][:length]
        assert tier.longest(key.scope, tokens) == (key if expected else None, expected)
    assert tier.longest("another", TOKENS) == (None, 0)
    clock.now += 301
    assert tier.longest(key.scope, TOKENS) == (None, 0) and tier.num_bytes == 0


def test_a_shorter_prefix_serves_again_when_the_longer_one_is_gone(model: Model) -> None:
    clock = Clock()
    tier, keys = DeviceTier(1 << 24, clock=clock), [make_key(i, end=CHUNK * (i + 1)) for i in range(4)]
    for num_chunks, ttl_s in ((2, 300.0), (4, 100.0)):
        sequence = filled(model, num_chunks)
        assert tier.put_chunks(keys[:num_chunks], sequence, Lease(clock.now, ttl_s, 1.0))
        sequence.release()
    clock.now += 200
    for key in keys[1::-1]:
        found = tier.get(key, clock.now)
        assert found is not None and found.committed_len == key.end
        found.release()
    assert set(tier.keys()) == set(keys[:2]) and tier.get(keys[3], clock.now) is None
    tier.delete(keys[0])
    assert list(tier.keys()) == [] and tier.num_bytes == 0


def test_what_was_shared_is_never_changed(model: Model) -> None:
    """Two branches of one prefix write and evict; a third reads what the first request stored."""
    with PrefixStore([], device=DeviceTier(1 << 24), chunk_len=CHUNK) as store:
        prefixes, cold = make_prefixes(store, model), cold_logits(model, TOKENS)
        prefill_reusing(make_runner(model), prefixes, TOKENS).sequence.release()
        for seed in range(3):
            other = TOKENS[: 4 * CHUNK] + prompt(40, seed=seed)
            found = prefill_reusing(make_runner(model), prefixes, other)
            assert found.matched_tokens == 4 * CHUNK
            found.sequence.release()
        hit = prefixes.lookup(TOKENS)
        assert torch.equal(finish(model, hit, TOKENS), cold)
        hit.sequence.release()


def test_limits_and_lives(model: Model) -> None:
    clock, sequence = Clock(), filled(model, 1)
    size = _held_bytes(model, sequence)
    tier = DeviceTier(2 * size, clock=clock)
    for number in range(5):
        assert tier.put(make_key(number), sequence, Lease(clock.now, 300.0, 1.0))
        clock.now += 1
        assert tier.num_bytes <= 2 * size
    assert set(tier.keys()) == {make_key(3), make_key(4)}
    clock.now += 299  # the fourth entry was put at 3
    assert tier.get(make_key(3), clock.now) is None and list(tier.keys()) == [make_key(4)]
    small = DeviceTier(size - 1)
    assert not small.put(make_key(1), sequence, LEASE) and small.num_bytes == 0
    for each in (tier, small):
        each.close()
    sequence.release()


def _held_bytes(model: Model, sequence: SequenceCache) -> int:
    tier = DeviceTier(1 << 24)
    tier.put(make_key(0), sequence, LEASE)
    size = tier.num_bytes
    tier.close()
    return size


def test_what_is_held_gives_way_to_a_request() -> None:
    """An arena that holds two prompts: the store's prefixes go when a lookup has no memory for its own."""
    model = ready(capacity=150_000)
    with PrefixStore([HostTier(1 << 24)], device=DeviceTier(1 << 24), chunk_len=CHUNK) as store:
        prefixes, runner = make_prefixes(store, model), make_runner(model)
        prompts = [prompt(4 * CHUNK + 1, seed=seed) for seed in range(6)]
        for tokens in prompts:
            found = prefixes.lookup(tokens)
            while True:
                try:
                    runner.prefill([found.sequence], [tokens[:-1]])
                    break
                except OutOfPages:
                    assert store.device is not None and store.device.shrink()
            prefixes.save(found.sequence, tokens)
            found.sequence.release()
        store.flush()
        for tokens in prompts:
            hit = prefixes.lookup(tokens)
            assert hit.matched_tokens == 4 * CHUNK
            hit.sequence.release()
        assert store.counters()["evicted.device.space"] > 3
    assert model.arena.used_bytes == 0


def test_a_lookup_without_memory_misses_with_that_reason() -> None:
    model = ready(capacity=150_000)
    with PrefixStore([HostTier(1 << 24)], chunk_len=CHUNK) as store:
        prefixes, runner = make_prefixes(store, model), make_runner(model)
        prefill_reusing(runner, prefixes, TOKENS).sequence.release()
        store.flush()
        hog, reason = [], None
        while reason != "no_memory":
            hit = prefixes.lookup(TOKENS)
            hog.append(hit.sequence)
            reason = hit.miss
        assert hit.matched_tokens == 0
        for sequence in hog:
            sequence.release()
    assert model.arena.used_bytes == 0


def test_an_impossible_limit_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        DeviceTier(0)
