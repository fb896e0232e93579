"""Lookups and saves on tiny models: hit and miss are one run; what must not be shared is not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvfold.engine.runner import Runner
from kvfold.errors import InputError, ModelError, PolicyError
from kvfold.models.loader import Model, wrap
from kvfold.store import DeviceTier, DiskTier, Event, HostTier, Prefixes, PrefixStore
from kvfold.store.store import tokenizer_digest
from kvfold.testing.prefix_reuse import Read, prefill_reusing
from tests.engine.runs import Shared
from tests.store.common import CHUNK, Clock, cold_logits, finish, make_prefixes, make_runner, positions
from tests.tiny import build, prompt, ready, tokenizer

LENGTH = 5 * CHUNK + 7
TOKENS = prompt(LENGTH)
LONG, MARKER = prompt(200, seed=2), 8 * CHUNK + 5
COMPRESSING = ["knorm + 2x", "keydiff + ada + 50tok + int8", "kvzip + 2x", "h2o + 60tok + int4", "full + int4"]
BOTH = [("llama", "full"), ("gemma3", "full"), *(("llama", policy) for policy in COMPRESSING)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[PrefixStore]:
    with PrefixStore([HostTier(1 << 24, clock=clock)], chunk_len=CHUNK, clock=clock) as made:
        yield made


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


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "yarn"])
def test_hit_and_miss_are_bitwise_one_run(shared: Shared, store: PrefixStore, family: str) -> None:
    model = shared(family)
    prefixes, cold = make_prefixes(store, model), cold_logits(model, TOKENS)
    first = read(prefixes, model)
    store.flush()
    second = read(prefixes, model)
    assert (first.matched_tokens, first.saved_tokens, first.tier, first.miss) == (0, 5 * CHUNK, None, "absent")
    assert (second.matched_tokens, second.saved_tokens, second.tier, second.miss) == (
        5 * CHUNK,
        5 * CHUNK,
        "host",
        None,
    )
    assert torch.equal(first.logits_V, cold) and torch.equal(second.logits_V, cold)
    assert generated(model, first) == generated(model, second)


@pytest.mark.parametrize("prefill_len", [CHUNK, 3 * CHUNK])
@pytest.mark.parametrize("with_device", [False, True])
def test_a_hit_at_a_marker_is_bitwise_a_run_that_stops_there(model: Model, prefill_len: int, with_device: bool) -> None:
    """Up to the marker, which ends no chunk; however long the chunks of the run are."""
    markers, device = [CHUNK + 3, 4 * CHUNK + 5], DeviceTier(1 << 24) if with_device else None
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=prefill_len)
    with PrefixStore([HostTier(1 << 24)], device=device, chunk_len=CHUNK) as store:
        prefixes = store.prefixes(model, prefill_len=prefill_len)
        found = []
        for _ in range(2):
            found.append(prefill_reusing(runner, prefixes, TOKENS, markers=markers))
            assert store.flush()
        first, second = found
        assert (first.matched_tokens, first.saved_tokens) == (0, markers[1])
        assert (second.matched_tokens, second.tier) == (markers[1], "device" if with_device else "host")
        assert torch.equal(first.logits_V, second.logits_V)
        assert generated(model, first) == generated(model, second)
        other_end = 4 * CHUNK + 4  # only the device serves what no entry ends with
        ends = ((markers[0], markers[0]), (3 * CHUNK, 3 * CHUNK), (other_end, other_end if with_device else 4 * CHUNK))
        for marker, expected in ends:
            hit = prefixes.lookup(TOKENS, markers=[marker])
            hit.sequence.release()
            assert hit.matched_tokens == expected
        other = [*TOKENS[: markers[1] - 1], TOKENS[markers[1] - 1] + 1, *TOKENS[markers[1] :]]
        hit = prefixes.lookup(other, markers=markers)
        hit.sequence.release()
        assert hit.matched_tokens == 4 * CHUNK


def test_markers_that_move_on_stay_within_the_limit(model: Model) -> None:
    """A conversation: every turn is found at the end of the one before, and old ends give way."""
    host = HostTier(1 << 18)
    with PrefixStore([host], chunk_len=CHUNK) as store:
        prefixes, before = make_prefixes(store, model), 0
        for marker in range(5, len(LONG), 5):
            found = read(prefixes, model, LONG[: marker + 2], [before, marker])
            found.sequence.release()
            assert found.matched_tokens in (before, before // CHUNK * CHUNK) and store.flush()
            assert matched_at(prefixes, marker) == marker and host.num_bytes <= 1 << 18
            before = marker
        assert store.counters()["evicted.host.space"] > 0


def matched_at(prefixes: Prefixes, marker: int) -> int:
    hit = prefixes.lookup(LONG, markers=[marker])
    hit.sequence.release()
    return hit.matched_tokens


@pytest.mark.parametrize("num_same", [CHUNK - 1, CHUNK, 3 * CHUNK + 5, 5 * CHUNK])
@pytest.mark.parametrize("with_device", [False, True])
def test_any_whole_chunk_that_agrees_is_reused(model: Model, num_same: int, with_device: bool) -> None:
    """Also out of the middle of what one device entry holds; the rest of the run is bitwise the cold one."""
    device = DeviceTier(1 << 24) if with_device else None
    with PrefixStore([HostTier(1 << 24)], device=device, chunk_len=CHUNK) as store:
        prefixes = make_prefixes(store, model)
        read(prefixes, model).sequence.release()
        store.flush()
        other = TOKENS[:num_same] + [(token + 1) % 90 for token in TOKENS[num_same:]]
        hit = prefixes.lookup(other)
        assert hit.matched_tokens == num_same // CHUNK * CHUNK
        assert hit.tier == (None if num_same < CHUNK else "device" if with_device else "host")
        assert torch.equal(finish(model, hit, other), cold_logits(model, other))
        hit.sequence.release()


@pytest.mark.parametrize(("num_same", "on_device"), [(5 * CHUNK, 80), (3 * CHUNK + 7, 48), (CHUNK - 1, 0)])
@pytest.mark.parametrize("with_device", [False, True])
@pytest.mark.parametrize("marker", [-1, 0, None])
def test_what_the_device_holds_is_reused_to_the_page(
    model: Model, num_same: int, on_device: int, with_device: bool, marker: int | None
) -> None:
    """Other tiers hold chunks of 32 tokens, and serve what the device has lost. Markers: inside the prompt, at its
    end, none."""
    device = DeviceTier(1 << 24) if with_device else None
    with PrefixStore([HostTier(1 << 24)], device=device, chunk_len=2 * CHUNK) as store:
        prefixes = make_prefixes(store, model)
        read(prefixes, model, markers=[len(TOKENS) - 1]).sequence.release()
        store.flush()
        other = TOKENS[:num_same] + [(token + 1) % 90 for token in TOKENS[num_same:]]
        markers = None if marker is None else [len(other) + marker]
        hit = prefixes.lookup(other, markers=markers)
        assert hit.matched_tokens == (on_device if with_device else num_same // (2 * CHUNK) * 2 * CHUNK)
        assert torch.equal(finish(model, hit, other), cold_logits(model, other))
        hit.sequence.release()
        if device is not None:
            device.close()
            hit = prefixes.lookup(other, markers=markers)
            hit.sequence.release()
            assert hit.matched_tokens == num_same // (2 * CHUNK) * 2 * CHUNK


def test_markers_bound_the_reuse_of_chunks(model: Model, store: PrefixStore) -> None:
    prefixes = make_prefixes(store, model)
    found = read(prefixes, model, markers=[3 * CHUNK + 2])
    found.sequence.release()
    assert found.saved_tokens == 3 * CHUNK + 2 and store.flush()
    for markers, expected in ((None, 3 * CHUNK), ([2 * CHUNK], 2 * CHUNK), ([], 0), ([5, 7], 0)):
        hit = prefixes.lookup(TOKENS, markers=markers)
        hit.sequence.release()
        assert hit.matched_tokens == expected


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


def test_angles_that_depend_on_the_length_are_refused(shared: Shared, store: PrefixStore) -> None:
    with pytest.raises(ModelError, match="length-dependent RoPE scaling"):
        make_prefixes(store, shared("dynamic_rope"))


# What must not be shared


def stored(store: PrefixStore, model: Model, tenant: str = "") -> None:
    read(make_prefixes(store, model, tenant=tenant), model).sequence.release()
    assert store.flush()


def matched(store: PrefixStore, model: Model, policy: str = "full", tenant: str = "") -> int:
    hit = make_prefixes(store, model, policy, tenant=tenant).lookup(TOKENS)
    hit.sequence.release()
    return hit.matched_tokens


def test_tenants_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model, tenant="a")
    assert [matched(store, model, tenant=tenant) for tenant in ("a", "b", "")] == [5 * CHUNK, 0, 0]


def test_other_weights_under_the_same_name_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model)
    other = ready("llama", seed=1)
    assert other.name == model.name and matched(store, other) == 0


def test_other_dtypes_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model)
    assert matched(store, wrap(model.hf, tokenizer(), kv_dtype=torch.bfloat16)) == 0
    assert matched(store, wrap(build().to(torch.bfloat16), tokenizer())) == 0


def test_other_policies_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model)
    assert [matched(store, model, policy) for policy in ("full", "full + int8", "knorm + 2x")] == [5 * CHUNK, 0, 0]


def test_other_tokenizers_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model)
    other = tokenizer()
    other.add_tokens(["<more>"])
    assert matched(store, wrap(model.hf, other)) == 0


def test_runs_of_other_shapes_share_nothing(model: Model, store: PrefixStore) -> None:
    """What another length of chunks computed differs in its last bits."""
    stored(store, model)
    hit = store.prefixes(model, prefill_len=2 * CHUNK).lookup(TOKENS)
    hit.sequence.release()
    assert hit.matched_tokens == 0


def test_scopes_are_the_same_in_every_process(model: Model, store: PrefixStore) -> None:
    program = (
        "from tests.store.common import *; from tests.tiny import ready; from kvfold.store import *;"
        "print(make_prefixes(PrefixStore([], chunk_len=CHUNK), ready(), 'knorm + 2x').binding.scope)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert found.strip() == make_prefixes(store, model, "knorm + 2x").binding.scope
    assert tokenizer_digest(tokenizer()) == tokenizer_digest(tokenizer())


# Lifetime, events, promotion


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
