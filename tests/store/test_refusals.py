"""Tiers that answer and refuse to change anything: a bad entry that cannot be deleted is left out, for a while."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.models.loader import Model
from kvfold.store import DiskTier, HostTier, PrefixStore, RedisTier
from kvfold.store.tiers.base import ByteTier
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.tiered_cache import BAD_S
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.store.common import (
    CHUNK,
    Clock,
    cold_logits,
    entry_files,
    finish,
    make_entry,
    make_key,
    make_prefixes,
    make_runner,
    overwrite,
)  # fmt: skip
from tests.store.servers import RedisServer
from tests.tiny import prompt

TOKENS = prompt(3 * CHUNK + 5)
MOST_GETS = 100
DAMAGE = {"header": 40, "layer": -1}
refuses = pytest.mark.parametrize("how", ["replica", "acl", "misconf"])
damages = pytest.mark.parametrize("damage", DAMAGE)


def bounded(tier: ByteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that asks for ever fails instead."""
    get, asked = tier.get, list[object]()

    def counted(key: Any, at: float) -> Any:
        asked.append(key)
        assert len(asked) < MOST_GETS, "asked for ever"
        return get(key, at)

    monkeypatch.setattr(tier, "get", counted)


def write(model: Model, tier: ByteTier, clock: Clock) -> None:
    with PrefixStore([tier], chunk_len=CHUNK, clock=clock) as store:
        prefill_reusing(make_runner(model), make_prefixes(store, model), TOKENS).sequence.release()


def quarantined(store: PrefixStore) -> int:
    return sum(count for name, count in store.counters().items() if name.startswith("quarantined."))


@pytest.mark.parametrize("wait", [True, False])
@damages
@refuses
def test_a_bad_entry_that_redis_keeps_is_a_miss(
    model: Model, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, how: str, damage: str, wait: bool
) -> None:
    clock, cold = Clock(), cold_logits(model, TOKENS)
    write(model, RedisTier(redis_server.url, clock=clock), clock)
    assert redis_server.flip(DAMAGE[damage]) == 3
    tier = RedisTier(redis_server.refuse(how), clock=clock)
    bounded(tier, monkeypatch)
    with PrefixStore([tier], chunk_len=CHUNK, clock=clock) as store:
        prefixes = make_prefixes(store, model)
        for _ in range(3):  # once found bad, it is not read again
            if wait:
                hit = prefixes.lookup(TOKENS)
                assert torch.equal(finish(model, hit, TOKENS), cold)
                hit.sequence.release()
            else:
                read = prefill_reusing(make_runner(model), prefixes, TOKENS)
                assert torch.equal(read.logits_V, cold)
                read.sequence.release()
            assert store.flush()  # what is queued to be written is found, and what is behind it looked up
            assert quarantined(store) == 1
        assert len(list(tier.keys())) == 3


@refuses
def test_failing_writes_shut_no_reads_and_good_reads_forgive_no_writes(redis_server: RedisServer, how: str) -> None:
    clock, key = Clock(), make_key(1)
    lease = Lease(clock.now, 300, 1.0)
    tier = RedisTier(redis_server.url, clock=clock)
    assert tier.put(key, make_entry(key, lease), lease)
    tier.close()
    tier = RedisTier(redis_server.refuse(how), clock=clock)
    for _ in range(4):
        assert tier.get(key, clock.now) is not None
        tier.delete(key)
        assert not tier.put(key, make_entry(key, lease), lease)
    is_open = {kind: breaker.is_open for kind, breaker in tier.breakers.items()}
    assert (is_open["read"], is_open["write"], is_open["delete"]) == (False, True, True)
    tier.close()


@damages
def test_a_repaired_entry_is_found_again(model: Model, redis_server: RedisServer, damage: str) -> None:
    """By whoever writes it anew at once; by others after a while."""
    clock = Clock()
    write(model, RedisTier(redis_server.url, clock=clock), clock)
    redis_server.flip(DAMAGE[damage])
    tier, others = RedisTier(redis_server.refuse("replica"), clock=clock), RedisTier(redis_server.url, clock=clock)
    with PrefixStore([tier], chunk_len=CHUNK, clock=clock) as store:
        prefixes, matched = make_prefixes(store, model), []

        def look() -> None:
            hit = prefixes.lookup(TOKENS)
            matched.append(hit.matched_tokens)
            hit.sequence.release()

        look()
        redis_server.ask("REPLICAOF", "NO", "ONE")
        redis_server.ask("FLUSHALL")
        write(model, others, clock)
        look()
        clock.now += BAD_S + 1
        look()
        redis_server.flip(DAMAGE[damage])
        prefill_reusing(make_runner(model), prefixes, TOKENS).sequence.release()
        store.flush()
        look()
        assert matched == [0, 0, 3 * CHUNK, 3 * CHUNK]


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, files can be read and nothing else."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def start() -> None:
        for name in ("unlink", "rename", "replace", "mkdir"):
            monkeypatch.setattr(Path, name, refuse)
        monkeypatch.setattr("os.replace", refuse)
        monkeypatch.setattr("os.utime", refuse)

    return start


@damages
def test_a_bad_entry_on_a_read_only_disk_is_a_miss(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: Callable[[], None], damage: str
) -> None:
    clock, cold = Clock(), cold_logits(model, TOKENS)
    write(model, DiskTier(tmp_path, 1 << 24, clock=clock), clock)
    for path in entry_files(tmp_path):
        data = bytearray(path.read_bytes())
        data[DAMAGE[damage]] ^= 1
        overwrite(path, bytes(data))
    tier = DiskTier(tmp_path, 1 << 24, clock=clock)
    bounded(tier, monkeypatch)
    with PrefixStore([tier], chunk_len=CHUNK, clock=clock) as store:
        read_only()
        for _ in range(3):
            read = prefill_reusing(make_runner(model), make_prefixes(store, model), TOKENS)
            read.sequence.release()
            assert torch.equal(read.logits_V, cold)
            assert store.flush() and quarantined(store) == 1
        assert len(entry_files(tmp_path)) == 3 and len(list(tier.keys())) == 3


def test_what_cannot_be_deleted_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is not made by forgetting: a limit holds, whatever the folder refuses."""
    clock = Clock()
    lease = Lease(clock.now, 300, 1.0)
    size = len(make_entry(make_key(0), lease))
    tier = DiskTier(tmp_path, 3 * size + size // 2, clock=clock)
    for number in range(3):
        assert tier.put(make_key(number), make_entry(make_key(number), lease), lease)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for number in range(3, 9):
            tier.put(make_key(number), make_entry(make_key(number), lease), lease)
            tier.delete(make_key(0))
            assert tier.num_bytes <= 3 * size + size // 2
        assert set(tier.keys()) == {make_key(number) for number in range(3)}
    assert tier.put(make_key(9), make_entry(make_key(9), lease), lease)
    assert tier.num_bytes <= 3 * size + size // 2 and len(entry_files(tmp_path)) == len(list(tier.keys())) == 3
    tier.close()


def test_attempts_are_bounded_where_every_copy_is_bad(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that forgets that it deleted, and says that it stored: each lookup ends, as a miss."""
    clock, host = Clock(), HostTier(1 << 24, clock=Clock())
    monkeypatch.setattr(host, "delete", lambda key: None)
    tokens = prompt(40 * CHUNK + 1)
    with PrefixStore([host], chunk_len=CHUNK, clock=clock) as store:
        runner, prefixes = make_runner(model), make_prefixes(store, model)
        prefill_reusing(runner, prefixes, tokens).sequence.release()
        store.flush()
        host._data = {key: data[:-1] + bytes([data[-1] ^ 1]) for key, data in host._data.items()}
        monkeypatch.setattr("kvfold.store.tiers.tiered_cache.BAD_S", 0.0)  # nothing is remembered
        bounded(host, monkeypatch)
        monkeypatch.setattr("tests.store.test_refusals.MOST_GETS", 40 * 64)
        hit = prefixes.lookup(tokens)
        assert hit.matched_tokens == 0 and hit.miss == "corrupt"
        hit.sequence.release()
        read = prefill_reusing(runner, prefixes, tokens)
        assert read.matched_tokens == 0
        read.sequence.release()
