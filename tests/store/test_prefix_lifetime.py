"""How long prefixes live, which tiers they go to, and what subscribers and counters are told."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.store import DeviceTier, DiskTier, Event, HostTier, PrefixStore
from tests.store.common import CHUNK, Clock, cold_logits, finish, make_prefixes
from tests.store.prefix_runs import TOKENS, matched, read, stored


def test_entries_live_from_the_start_of_the_last_request(model: Model, store: PrefixStore, clock: Clock) -> None:
    prefixes = make_prefixes(store, model)
    found = read(prefixes, model)
    store.flush()
    clock.now += 299
    hit = prefixes.lookup(TOKENS, at=clock.now - 100)
    assert hit.matched_tokens == 5 * CHUNK
    hit.sequence.release()
    clock.now += 200
    hit = prefixes.lookup(TOKENS)
    assert (hit.matched_tokens, hit.miss) == (0, "expired")
    hit.sequence.release()
    assert prefixes.save(found.sequence, TOKENS, ttl="1h") == 5 * CHUNK
    found.sequence.release()
    store.flush()
    clock.now += 3599
    assert matched(store, model) == 5 * CHUNK


def test_a_longer_life_is_written_again(model: Model, store: PrefixStore, clock: Clock) -> None:
    prefixes = make_prefixes(store, model)
    found = read(prefixes, model)
    store.flush()
    before = store.counters()["stored.host"]
    prefixes.save(found.sequence, TOKENS, ttl="5m")
    store.flush()
    assert store.counters()["stored.host"] == before  # it was there
    prefixes.save(found.sequence, TOKENS, ttl="1h")
    found.sequence.release()
    store.flush()
    assert store.counters()["stored.host"] == 2 * before
    clock.now += 3000
    assert matched(store, model) == 5 * CHUNK


@pytest.mark.parametrize("ttl", ["10m", 0, -1, 1e9, float("nan")])
def test_other_lives_are_refused(model: Model, store: PrefixStore, ttl: object) -> None:
    hit = make_prefixes(store, model).lookup(TOKENS)
    with pytest.raises(InputError, match="a time to live is"):
        make_prefixes(store, model).save(hit.sequence, TOKENS, ttl=ttl)  # type: ignore[arg-type]
    hit.sequence.release()


def test_what_a_slow_tier_has_goes_to_the_faster_ones(model: Model, tmp_path: Path) -> None:
    with PrefixStore([DiskTier(tmp_path, 1 << 24)], chunk_len=CHUNK) as store:
        stored(store, model)
    host, device, events = HostTier(1 << 24), DeviceTier(1 << 24), list[Event]()
    with PrefixStore([host, DiskTier(tmp_path, 1 << 24)], device=device, chunk_len=CHUNK) as store:
        store.subscribe(events.append)
        prefixes = make_prefixes(store, model)
        for expected in ("disk", "device", "host"):
            hit = prefixes.lookup(TOKENS)
            assert (hit.tier, hit.matched_tokens) == (expected, 5 * CHUNK)
            assert torch.equal(finish(model, hit, TOKENS), cold_logits(model, TOKENS))
            hit.sequence.release()
            store.flush()
            if expected == "device":
                assert device.shrink() and not device.shrink()
        promoted = [event.tier for event in events if event.kind == "promoted"]
        assert sorted(promoted) == ["device", "device", *["host"] * 5]
        hits = [(event.tier, event.num_tokens) for event in events if event.kind == "hit"]
        assert hits == [(tier, 5 * CHUNK) for tier in ("disk", "device", "host")]
        assert store.counters()["hit_tokens"] == 15 * CHUNK


def test_a_device_that_holds_a_part_is_completed_from_slower_tiers(model: Model) -> None:
    with PrefixStore([HostTier(1 << 24)], device=DeviceTier(1 << 24), chunk_len=CHUNK) as store:
        prefixes = make_prefixes(store, model)
        stored(store, model)
        assert store.device is not None and store.device.shrink()
        read(prefixes, model, TOKENS[: 2 * CHUNK + 1]).sequence.release()  # the device has two chunks now
        hit = prefixes.lookup(TOKENS)
        assert (hit.tier, hit.matched_tokens, len(hit.sequence.segments)) == ("host", 5 * CHUNK, 2)
        assert torch.equal(finish(model, hit, TOKENS), cold_logits(model, TOKENS))
        hit.sequence.release()


def test_short_prompts_miss_with_that_reason(model: Model, store: PrefixStore) -> None:
    prefixes = make_prefixes(store, model)
    for length in (0, 1, CHUNK):
        hit = prefixes.lookup(TOKENS[:length])
        assert (hit.matched_tokens, hit.miss) == (0, "too_short")
        hit.sequence.release()
    assert store.counters() == {"missed.too_short": 3, "missed_tokens": 1 + CHUNK}


def test_a_subscriber_that_fails_is_dropped(model: Model, store: PrefixStore) -> None:
    def fail(event: Event) -> None:
        raise RuntimeError("no")

    events: list[Event] = []
    store.subscribe(fail)
    end = store.subscribe(events.append)
    with pytest.warns(UserWarning, match="is dropped"):
        matched(store, model)
    matched(store, model)
    end()
    matched(store, model)
    assert len(events) == 2


def test_what_is_not_in_the_queue_in_time_is_dropped_and_counted(model: Model) -> None:
    with PrefixStore([HostTier(1 << 24)], chunk_len=CHUNK, queue_bytes=1) as store:
        gate = threading.Event()

        def wait() -> None:
            gate.wait()

        store._write_queue.submit(1, wait)
        read(make_prefixes(store, model), model).sequence.release()
        gate.set()
        store.flush()
        assert store.counters()["failed.queue_full"] == 5 and matched(store, model) == 0
