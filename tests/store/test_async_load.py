"""Layers of a stored prefix that come while the model runs: waited for one by one, or the pass was for nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from kvfold.errors import OutOfPages, PrefixLost
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.store import DeviceTier, HostTier, Prefixes, PrefixStore
from kvfold.store import lookup as reading
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.store.common import CHUNK, cold_logits, finish, make_prefixes, make_runner
from tests.tiny import prompt, ready

TOKENS, MARKER = prompt(4 * CHUNK + 9), 4 * CHUNK + 5


@pytest.fixture
def host() -> HostTier:
    return HostTier(1 << 24)


@pytest.fixture
def store(host: HostTier) -> Iterator[PrefixStore]:
    with PrefixStore([host], chunk_len=CHUNK) as made:
        yield made


def written(store: PrefixStore, model: Model) -> Prefixes:
    """Four chunks and a part, in the byte tiers."""
    prefixes = make_prefixes(store, model)
    prefill_reusing(make_runner(model), prefixes, TOKENS, markers=[MARKER]).sequence.release()
    assert store.flush()
    return prefixes


def spoil(host: HostTier, start: int, *, block: int = 2) -> None:
    """Flip a byte of an entry in the block of a layer, of which there are three."""
    ((key, data),) = ((key, data) for key, data in host._data.items() if key.start == start)
    place = len(data) - 1 - (2 - block) * len(data) // 3
    host._data[key] = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def there(sequence: SequenceCache) -> list[int]:
    """Slots in each layer's first head."""
    return [sequence.stored_lens(layer)[0] for layer in range(sequence.spec.num_layers)]


def is_reading() -> bool:
    return any(thread.name.startswith("kvfold-read") for thread in threading.enumerate())


def test_layers_come_when_they_are_asked_for(model: Model, store: PrefixStore) -> None:
    prefixes = written(store, model)
    hit = prefixes.lookup(TOKENS, markers=[MARKER], wait=False)
    assert (hit.matched_tokens, hit.sequence.committed_len, there(hit.sequence)) == (MARKER, MARKER, [0, 0, 0])
    hit.sequence.wait_loaded(1)
    assert there(hit.sequence) == [MARKER, MARKER, 0] and "hit.host" not in store.counters()
    assert torch.equal(finish(model, hit, TOKENS), cold_logits(model, TOKENS, [MARKER]))
    assert store.counters()["hit.host"] == 1 and hit.sequence.loading is None and not is_reading()
    hit.sequence.release()


def test_whoever_needs_all_layers_waits_for_them(model: Model, store: PrefixStore) -> None:
    """A decode step, a fork, which outlives what it was made of, and what is saved again."""
    prefixes, runner = written(store, model), make_runner(model)
    complete = prefixes.lookup(TOKENS, markers=[MARKER])
    expected = runner.decode([complete.sequence], TOKENS[MARKER : MARKER + 1])
    stepping = prefixes.lookup(TOKENS, markers=[MARKER], wait=False)
    assert torch.equal(runner.decode([stepping.sequence], TOKENS[MARKER : MARKER + 1]), expected)
    forked = prefixes.lookup(TOKENS, markers=[MARKER], wait=False)
    branch = forked.sequence.fork()
    forked.sequence.release()
    assert there(branch) == [MARKER] * 3
    assert torch.equal(runner.decode([branch], TOKENS[MARKER : MARKER + 1]), expected)
    with PrefixStore([HostTier(1 << 24)], chunk_len=CHUNK) as other:
        saved = prefixes.lookup(TOKENS, markers=[MARKER], wait=False)
        assert make_prefixes(other, model).save(saved.sequence, TOKENS, upto=MARKER) == MARKER and other.flush()
        found = make_prefixes(other, model).lookup(TOKENS, markers=[MARKER])
        assert torch.equal(runner.decode([found.sequence], TOKENS[MARKER : MARKER + 1]), expected)
    for sequence in (complete.sequence, stepping.sequence, branch, saved.sequence, found.sequence):
        sequence.release()
    assert model.arena.used_bytes == 0 and not is_reading()


def test_who_leaves_while_layers_are_on_their_way_leaves_nothing(model: Model, store: PrefixStore) -> None:
    """Pages, threads, files; and what was stored is still good."""
    prefixes = written(store, model)
    for layer in (None, 0, 1):
        hit = prefixes.lookup(TOKENS, markers=[MARKER], wait=False)
        if layer is not None:
            hit.sequence.wait_loaded(layer)
        hit.sequence.release()
        assert model.arena.used_bytes == 0 and not is_reading()
    assert not {"hit.host", "quarantined.host.corrupt"} & set(store.counters())


@pytest.mark.parametrize("start", [0, 2 * CHUNK, 4 * CHUNK])
def test_a_bad_block_ends_the_pass_that_needs_it(model: Model, host: HostTier, store: PrefixStore, start: int) -> None:
    """The sequence is as it was, the entry set aside; the next lookup finds what is good, and the tokens are right."""
    prefixes = written(store, model)
    spoil(host, start)
    hit = prefixes.lookup(TOKENS, markers=[MARKER], wait=False)
    assert hit.matched_tokens == MARKER, "what is bad comes out later"
    with pytest.raises(PrefixLost, match="corrupt: block 2 "):
        finish(model, hit, TOKENS)
    assert hit.sequence.committed_len == MARKER and there(hit.sequence) == [MARKER, MARKER, 0]
    hit.sequence.release()
    assert not is_reading() and model.arena.used_bytes == 0
    assert (store.counters()["quarantined.host.corrupt"], store.counters().get("hit.host", 0)) == (1, 0)
    again = prefixes.lookup(TOKENS, markers=[MARKER], wait=False)
    assert (again.matched_tokens, again.miss) == (start, None if start else "corrupt")
    again.sequence.release()


@pytest.mark.parametrize(("num_open", "num_bad"), [(64, 2), (2, 1)])
@pytest.mark.parametrize("wait", [False, True])
def test_lookups_are_made_again_until_what_they_found_is_good(
    model: Model,
    host: HostTier,
    store: PrefixStore,
    wait: bool,
    num_open: int,
    num_bad: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two bad ones, of which the later comes out first, whoever waits for it; unless files are opened two by two, since
    the first two are read before."""
    monkeypatch.setattr(reading, "_OPEN_FILES", num_open)
    prefixes, cold = written(store, model), cold_logits(model, TOKENS, [MARKER])
    spoil(host, CHUNK)
    spoil(host, 3 * CHUNK, block=0)
    if wait:
        hit = prefixes.lookup(TOKENS, markers=[MARKER])
        matched, sequence = hit.matched_tokens, hit.sequence
    else:
        found = prefill_reusing(make_runner(model), prefixes, TOKENS, markers=[MARKER])
        matched, sequence = found.matched_tokens, found.sequence
        assert torch.equal(found.logits_V, cold)
    sequence.release()
    assert matched == CHUNK and store.counters()["quarantined.host.corrupt"] == num_bad
    assert store.counters()["hit.host"] == 1


def test_out_of_pages_in_the_middle_changes_nothing(host: HostTier, store: PrefixStore) -> None:
    """The pass that finds no memory for its own tokens is run again when there is some."""
    small = ready("llama", capacity=100 * 4096)
    prefixes, cold = written(store, small), cold_logits(small, TOKENS, [MARKER])
    hit = prefixes.lookup(TOKENS, markers=[MARKER], wait=False)
    held = [small.arena.allocate(hit.sequence.page_class(0), 1) for _ in range(small.arena.free_bytes // 4096)]
    more = [*TOKENS[MARKER:], *prompt(60, seed=3)]
    with pytest.raises(OutOfPages):
        make_runner(small).prefill([hit.sequence], [more])
    assert there(hit.sequence) == [MARKER] * 3 and hit.sequence.committed_len == MARKER
    for span in (span for spans in held for span in spans):
        small.arena.free(span)
    assert torch.equal(finish(small, hit, TOKENS), cold)
    hit.sequence.release()
    assert small.arena.used_bytes == 0 and store.counters()["hit.host"] == 1


def test_what_arrived_is_held_on_the_device_as_long_as_it_was(model: Model, host: HostTier) -> None:
    """Not with the tokens of the pass in which it arrived."""
    with PrefixStore([host], chunk_len=CHUNK) as first:
        written(first, model)
    with PrefixStore([host], device=DeviceTier(1 << 24), chunk_len=CHUNK) as store:
        prefixes, cold = make_prefixes(store, model), cold_logits(model, TOKENS, [MARKER])
        for tier in ("host", "device"):
            found = prefill_reusing(make_runner(model), prefixes, TOKENS, markers=[MARKER])
            found.sequence.release()
            assert (found.matched_tokens, found.tier) == (MARKER, tier) and torch.equal(found.logits_V, cold)
    gc.collect()
    assert model.arena.used_bytes == 0
