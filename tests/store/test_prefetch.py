"""Prefixes that are fetched before they are looked up: they come to the fastest tier, and are checked all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.models.loader import Model
from kvfold.store import DiskTier, HostTier, PrefixStore
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.store.common import CHUNK, entry_files, make_prefixes, make_runner, overwrite
from tests.tiny import prompt

TOKENS = prompt(4 * CHUNK + 3)
MARKERS = [CHUNK, 4 * CHUNK]


def write(model: Model, folder: Path, policy: str) -> None:
    with PrefixStore([DiskTier(folder, 1 << 24)], chunk_len=CHUNK) as store:
        prefixes = make_prefixes(store, model, policy)
        prefill_reusing(make_runner(model), prefixes, TOKENS, markers=MARKERS).sequence.release()


def fetched(model: Model, store: PrefixStore, policy: str = "full") -> tuple[int, str | None]:
    """What a lookup finds, and where, after more tokens than are stored were asked for."""
    prefixes, longer = make_prefixes(store, model, policy), [*TOKENS, *TOKENS]
    prefixes.prefetch(longer, markers=[*MARKERS, 7 * CHUNK], at=store.clock())
    assert store.flush()
    hit = prefixes.lookup(TOKENS, markers=MARKERS)
    hit.sequence.release()
    assert store.flush()
    return hit.matched_tokens, hit.tier


@pytest.mark.parametrize(("policy", "num_fetched"), [("full", 4), ("knorm + 1.4x", 1)])
def test_what_was_fetched_is_found_in_the_host(model: Model, tmp_path: Path, policy: str, num_fetched: int) -> None:
    write(model, tmp_path, policy)
    with PrefixStore([HostTier(1 << 24), DiskTier(tmp_path, 1 << 24)], chunk_len=CHUNK) as store:
        assert fetched(model, store, policy) == (4 * CHUNK, "host")
        assert store.counters()["promoted.host"] == num_fetched
        assert fetched(model, store, policy) == (4 * CHUNK, "host")
        assert store.counters()["promoted.host"] == num_fetched, "what is there already stays"


def test_damage_that_was_fetched_is_found(model: Model, tmp_path: Path) -> None:
    write(model, tmp_path, "full")
    with PrefixStore([HostTier(1 << 24), DiskTier(tmp_path, 1 << 24)], chunk_len=CHUNK) as store:
        (second,) = [path for path in entry_files(tmp_path) if path.name.startswith(f"{CHUNK:x}-")]
        data = second.read_bytes()
        overwrite(second, data[:-1] + bytes([data[-1] ^ 1]))
        assert fetched(model, store) == (CHUNK, "host")
        counters = store.counters()
        assert counters["quarantined.host.corrupt"] == counters["quarantined.disk.corrupt"] == 1


def test_nothing_is_fetched_that_cannot_be_an_entry(model: Model, tmp_path: Path) -> None:
    write(model, tmp_path, "full")
    size = entry_files(tmp_path)[0].stat().st_size
    for path in entry_files(tmp_path):
        overwrite(path, b"x" * size)
    for limit in (size - 1, size):
        with PrefixStore([HostTier(1 << 24), DiskTier(tmp_path, 1 << 24)], chunk_len=CHUNK) as store:
            store.max_entry_bytes = limit
            make_prefixes(store, model).prefetch(TOKENS, markers=MARKERS, at=store.clock())
            assert store.flush() and "promoted.host" not in store.counters()
