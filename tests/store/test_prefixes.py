"""Lookups and saves of chunks on tiny models: hit and miss are one run, up to a chunk, a marker or a page."""

from __future__ import annotations

import pytest
import torch

from kvfold.engine.runner import Runner
from kvfold.errors import ModelError
from kvfold.models.loader import Model
from kvfold.store import DeviceTier, HostTier, Prefixes, PrefixStore
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.engine.runs import Shared
from tests.store.common import CHUNK, cold_logits, finish, make_prefixes
from tests.store.prefix_runs import LONG, TOKENS, generated, read


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


def test_a_prefix_that_ends_inside_a_sequence_shares_its_pages(model: Model) -> None:
    """And hits of one length share one segment, so that a decode step can read it for all of them."""
    device, marker = DeviceTier(1 << 24), len(TOKENS) - 2
    with PrefixStore([], device=device, chunk_len=CHUNK, offload=False) as store:
        prefixes = make_prefixes(store, model)
        hit = prefixes.lookup(TOKENS, markers=[marker])
        finish(model, hit, TOKENS)
        before = model.arena.used_bytes
        assert prefixes.save(hit.sequence, TOKENS, upto=marker) == marker
        assert model.arena.used_bytes == before, "nothing is copied"
        hits = [prefixes.lookup(TOKENS, markers=[marker]).sequence for _ in range(2)]
        assert hits[0].committed_len == marker and hits[0].segments[0] is hits[1].segments[0]
        for sequence in (hit.sequence, *hits):
            sequence.release()
        again = prefixes.lookup(TOKENS, markers=[marker]).sequence
        assert again.committed_len == marker, "the entry holds what nobody else does"
        again.release()


def test_without_offload_prefixes_stay_on_the_device(model: Model) -> None:
    host, device = HostTier(1 << 24), DeviceTier(1 << 24)
    with PrefixStore([host], device=device, chunk_len=CHUNK, offload=False) as store:
        prefixes = make_prefixes(store, model)
        first, second = (read(prefixes, model) for _ in range(2))
        assert first.saved_tokens == 5 * CHUNK and second.tier == "device"
        assert store.flush() and host.num_bytes == 0
        while device.shrink():
            pass
        third = read(prefixes, model)
        assert third.matched_tokens == 0
        for one in (first, second, third):
            one.sequence.release()


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


def test_angles_that_depend_on_the_length_are_refused(shared: Shared, store: PrefixStore) -> None:
    with pytest.raises(ModelError, match="length-dependent RoPE scaling"):
        make_prefixes(store, shared("dynamic_rope"))
