"""One suite for every byte tier: what is put comes back until it expires, limits hold at all times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event as Flag
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import InputError
from kvfold.store.events import Event
from kvfold.store.key import Key
from kvfold.store.tiers.base import ByteTier
from kvfold.store.tiers.disk import DiskTier
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.folder import write_entry
from kvfold.store.tiers.host import HostTier
from kvfold.store.tiers.redis import RedisTier
from tests.store.common import Clock, make_entry, make_key
from tests.store.servers import RedisServer

LIMIT = 20_000
Bounded = HostTier | DiskTier


def lease(clock: Clock, ttl_s: float = 300.0, saved_s: float = 1.0) -> Lease:
    return Lease(clock.now, ttl_s, saved_s)


def entry(key: Key, clock: Clock, ttl_s: float = 300.0) -> tuple[Key, bytes, Lease]:
    return key, make_entry(key, lease(clock, ttl_s)), lease(clock, ttl_s)


def content(tier: ByteTier, key: Key, at: float) -> bytes | None:
    file = tier.get(key, at)
    if file is None:
        return None
    with file:
        return file.read()


@pytest.fixture(params=["host", "disk", "redis"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[ByteTier]:
    made: ByteTier
    if request.param == "host":
        made = HostTier(LIMIT, clock=clock)
    elif request.param == "disk":
        made = DiskTier(tmp_path / "store", LIMIT, clock=clock)
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        made = RedisTier(server.url, clock=clock)
    yield made
    made.close()


def make_bounded(kind: str, folder: Path, clock: Clock) -> Bounded:
    return HostTier(LIMIT, clock=clock) if kind == "host" else DiskTier(folder, LIMIT, clock=clock)


def test_what_is_put_comes_back(tier: ByteTier, clock: Clock) -> None:
    keys = [make_key(i) for i in range(3)]
    for key in keys:
        assert tier.put(*entry(key, clock))
    assert set(tier.keys()) == set(keys)
    assert content(tier, keys[1], clock.now) == make_entry(keys[1], lease(clock))
    tier.delete(keys[1])
    tier.delete(keys[1])
    assert content(tier, keys[1], clock.now) is None and set(tier.keys()) == {keys[0], keys[2]}


def test_putting_again_replaces(tier: ByteTier, clock: Clock) -> None:
    key = make_key(1)
    for num_layers in (5, 2, 7):
        data = make_entry(key, lease(clock), num_layers=num_layers)
        assert tier.put(key, data, lease(clock))
        assert content(tier, key, clock.now) == data and list(tier.keys()) == [key]


def test_what_was_never_put_is_not_there(tier: ByteTier, clock: Clock) -> None:
    assert content(tier, make_key(1), clock.now) is None and list(tier.keys()) == []


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("use", ["get", "touch"])
def test_time_to_live_slides_from_the_start_of_a_request(kind: str, use: str, tmp_path: Path, clock: Clock) -> None:
    tier, key = make_bounded(kind, tmp_path, clock), make_key(1)
    events: list[Event] = []
    tier.events.subscribe(events.append)
    tier.put(*entry(key, clock))
    clock.now += 299
    if use == "get":  # by a request that has been running for four minutes
        assert content(tier, key, clock.now - 240) is not None
    else:
        tier.touch(key, clock.now - 240)
    clock.now += 59
    assert content(tier, key, 0.0) is not None
    clock.now += 1
    assert content(tier, key, clock.now) is None
    assert [(event.kind, event.reason) for event in events[1:]] == [("evicted", "expired")]
    assert list(tier.keys()) == [] and tier.num_bytes == 0


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_is_too_large_is_refused_and_nothing_goes(kind: str, tmp_path: Path, clock: Clock) -> None:
    tier = make_bounded(kind, tmp_path, clock)
    tier.put(*entry(make_key(1), clock))
    assert not tier.put(make_key(2), bytes(LIMIT + 1), lease(clock))
    assert list(tier.keys()) == [make_key(1)]


@pytest.mark.parametrize("kind", ["host", "disk"])
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9000), st.integers(1, 9), st.integers(0, 4)), max_size=30))
def test_limits_hold_after_every_put(
    kind: str, tmp_path_factory: pytest.TempPathFactory, puts: list[tuple[int, int, int, int]]
) -> None:
    """What is there is what a plain list of the newest, worthiest and living says it is; bytes are counted anew."""
    clock = Clock()
    tier = make_bounded(kind, tmp_path_factory.mktemp("store"), clock)
    gone: set[Key] = set()
    tier.events.subscribe(lambda event: gone.add(event.key) if event.kind == "evicted" and event.key else None)
    held: dict[Key, tuple[bytes, float]] = {}
    for number, size, ttl, wait in puts:
        clock.now += wait
        key, data = make_key(number), bytes([number]) * size
        gone.clear()
        assert tier.put(key, data, lease(clock, ttl))
        for other in gone:
            assert held.pop(other)[1] <= clock.now or sum(len(d) for d, _ in held.values()) + size <= LIMIT
        held[key] = data, clock.now + ttl
        assert tier.num_bytes == sum(len(d) for d, _ in held.values()) <= LIMIT
        assert set(tier.keys()) == set(held)
    for key, (data, expires_at) in held.items():
        assert content(tier, key, 0.0) == (data if expires_at > clock.now else None)
    tier.close()


def test_limits_of_memory_hold_while_many_put(clock: Clock) -> None:
    tier, stop, seen = HostTier(LIMIT, clock=clock), Flag(), [0]

    def watch() -> None:
        while not stop.is_set():
            seen.append(tier.num_bytes)

    watcher = Thread(target=watch)
    watcher.start()
    _use_at_once(tier, clock)
    stop.set()
    watcher.join()
    assert 0 < max(seen) <= LIMIT


def test_limits_of_a_folder_hold_while_many_put(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the files, whenever one is about to be written: nothing else is written at that time."""
    tier, seen = DiskTier(tmp_path, LIMIT, clock=clock), [0]

    def counted(path: Path, data: bytes, expires_at: float) -> None:
        seen.append(len(data) + sum(_size(other) for other in tmp_path.rglob("*.*")))
        write_entry(path, data, expires_at)

    monkeypatch.setattr("kvfold.store.tiers.disk.write_entry", counted)
    _use_at_once(tier, clock)
    assert 0.5 * LIMIT < max(seen) <= LIMIT and tier.num_bytes <= LIMIT
    for key in tier.keys():  # noqa: SIM118 - not a mapping
        assert content(tier, key, clock.now) is not None


def test_an_entry_asked_for_while_it_is_written_stays_counted(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, key, answers = DiskTier(tmp_path, LIMIT, clock=clock), make_key(1), []
    reader = Thread(target=lambda: answers.append(content(tier, key, clock.now)))

    def asked_for(path: Path, data: bytes, expires_at: float) -> None:
        reader.start()
        reader.join(0.5)
        write_entry(path, data, expires_at)

    monkeypatch.setattr("kvfold.store.tiers.disk.write_entry", asked_for)
    tier.put(key, bytes(3000), lease(clock))
    reader.join()
    assert answers == [bytes(3000)] and list(tier.keys()) == [key]


def _use_at_once(tier: Bounded, clock: Clock) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(100):
            pool.submit(tier.put, make_key(number), bytes(3000 + number), lease(clock))
            pool.submit(tier.get, make_key(number // 2), clock.now)
            pool.submit(tier.delete, make_key(number // 3))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted while files were counted
        return 0


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_saves_least_per_byte_goes_first_then_what_was_used_longest_ago(
    kind: str, tmp_path: Path, clock: Clock
) -> None:
    tier = make_bounded(kind, tmp_path, clock)
    for number, saved_s in ((0, 9.0), (1, 1.0), (2, 5.0), (3, 5.0)):
        tier.put(make_key(number), bytes(LIMIT // 4), lease(clock, saved_s=saved_s))
        clock.now += 1
    tier.touch(make_key(2), clock.now)
    for number, expected in ((4, {0, 2, 3, 4}), (5, {0, 2, 4, 5}), (6, {0, 4, 5, 6})):
        tier.put(make_key(number), bytes(LIMIT // 4), lease(clock, saved_s=7.0))
        assert set(tier.keys()) == {make_key(i) for i in expected}


def test_impossible_limits_are_refused(tmp_path: Path) -> None:
    make: tuple[Callable[[], object], ...] = (lambda: HostTier(0), lambda: DiskTier(tmp_path, 0))
    for one in make:
        with pytest.raises(InputError, match="at least 1"):
            one()
