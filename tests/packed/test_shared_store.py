"""The store of the connector: a folder and Redis behind it, shared by processes, and copies that fail their check."""

from __future__ import annotations

from pathlib import Path

from kvfold.store.entry.format import EntryReader, InvalidEntry
from kvfold.store.tiers.disk import path_of
from kvfold.vllm.settings import Settings
from kvfold.vllm.shared_store import SharedStore
from tests.store.common import BINDING, make_entry, make_key
from tests.store.servers import RedisServer


def fill(store: SharedStore, *numbers: int) -> None:
    for number in numbers:
        key = make_key(number)
        assert store.put(key, 100, lambda lease, key=key: make_entry(key, lease))  # type: ignore[misc]
    assert store._queue.flush(30)


def test_entries_go_to_the_folder_and_to_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    both = SharedStore(Settings(store=str(tmp_path), redis=redis_server.url), b"")
    fill(both, 0, 1, 2)
    keys = [make_key(number) for number in range(4)]
    remote, local = SharedStore(Settings(redis=redis_server.url), b""), SharedStore(Settings(store=str(tmp_path)), b"")
    assert [store.num_leading(keys) for store in (both, remote, local)] == [3, 3, 3]
    path_of(tmp_path, keys[1]).unlink()
    assert [store.num_leading(keys) for store in (both, remote, local)] == [3, 3, 1], "Redis has what the folder lost"
    copy = both.open(keys[1])
    assert copy is not None and copy.tier.name == "redis"
    with copy.file as file:
        assert len(list(EntryReader(file, keys[1], BINDING).blocks())) == 2
    redis_server.kill()
    assert both.num_leading(keys) == 1 and remote.num_leading(keys) == 0
    for store in (both, remote, local):
        store.close()


def test_a_bad_copy_is_put_aside_and_can_be_written_anew(tmp_path: Path) -> None:
    store = SharedStore(Settings(store=str(tmp_path)), b"")
    fill(store, 0)
    copy = store.open(make_key(0))
    assert copy is not None
    copy.file.close()
    store.drop(copy, InvalidEntry("corrupt", "a test says so"))
    assert not store.has(make_key(0)) and store.open(make_key(0)) is None
    assert [path.suffix for path in sorted((tmp_path / "quarantine").iterdir())] == [".kvp", ".txt"]
    fill(store, 0)
    again = store.open(make_key(0))
    assert again is not None
    again.file.close()
    store.close()
