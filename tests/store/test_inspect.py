"""A store seen from outside: while somebody owns it, without making anything live longer, and after damage."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from kvfold.errors import FileError, InputError
from kvfold.store.inspect import FolderInspector, RedisInspector, StoreInspector
from kvfold.store.key import Binding
from kvfold.store.tiers.base import ByteTier
from kvfold.store.tiers.disk import DiskTier
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.redis import RedisTier
from tests.store.common import BINDING, Clock, entry_files, make_entry, make_key
from tests.store.servers import RedisServer


def put(tier: ByteTier, number: int, lease: Lease) -> None:
    assert tier.put(make_key(number), make_entry(make_key(number), lease), lease)


def lives(inspector: StoreInspector) -> dict[str, float]:
    return {found.key.digest: found.expires_at for found in inspector.find()}


def test_a_folder_is_read_while_another_owns_it(tmp_path: Path) -> None:
    clock = Clock()
    tier, inspector = DiskTier(tmp_path, 1 << 20, clock=clock), FolderInspector(tmp_path)
    for number in range(3):
        put(tier, number, Lease(clock.now, 300 + number, 1.5))
    found = sorted(inspector.find(), key=lambda one: one.ttl_s)
    assert [one.key for one in found] == [make_key(number) for number in range(3)]
    assert [(one.ttl_s, one.saved_s, one.expires_at) for one in found] == [
        (300 + number, 1.5, clock.now + 300 + number) for number in range(3)
    ]
    assert sum(one.num_bytes for one in found) == tier.num_bytes
    assert all(inspector.check(one.key) is None and inspector.facts(one.key) == BINDING.facts() for one in found)
    assert lives(inspector) == {one.key.digest: one.expires_at for one in found}
    assert inspector.is_in_use
    with pytest.raises(FileError, match="in use by another store"):
        inspector.delete(make_key(0))
    tier.close()
    assert not inspector.is_in_use
    inspector.delete(make_key(0))
    assert len(entry_files(tmp_path)) == 2
    with pytest.raises(FileError, match="in use by another store"):
        DiskTier(tmp_path, 1 << 20)
    inspector.close()
    DiskTier(tmp_path, 1 << 20).close()


@pytest.mark.parametrize(("reason", "at"), [("corrupt", -1), ("corrupt", 40), ("foreign", 0)])
def test_damage_is_found(tmp_path: Path, reason: str, at: int) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    put(tier, 0, Lease(Clock().now, 300, 1.0))
    (path,) = entry_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    error = FolderInspector(tmp_path).check(make_key(0))
    assert error is not None
    assert error.reason == reason
    tier.close()


def test_an_entry_in_the_place_of_another_is_found(tmp_path: Path) -> None:
    clock = Clock()
    tier, inspector = DiskTier(tmp_path, 1 << 20, clock=clock), FolderInspector(tmp_path)
    lease = Lease(clock.now, 300, 1.0)
    other = Binding("chunks", "w2", "float32", "float32", "r", "t", "p", "", 16, 16, "")
    tier.put(make_key(0), make_entry(make_key(1), lease), lease)
    tier.put(make_key(2), make_entry(make_key(2), lease, binding=other), lease)
    errors = [inspector.check(make_key(number)) for number in (0, 2)]
    assert [error and error.reason for error in errors] == ["swapped", "foreign"]
    assert inspector.check(make_key(9)) is None  # gone is not wrong
    tier.close()


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds no prefix store"):
        FolderInspector(tmp_path)


def test_redis_is_read_without_making_entries_live_longer(redis_server: RedisServer) -> None:
    tier, inspector = RedisTier(redis_server.url), RedisInspector(redis_server.url)
    put(tier, 0, Lease(time.time() - 100, 300, 2.5))
    (found,) = inspector.find()
    assert (found.key, found.ttl_s, found.saved_s) == (make_key(0), 300, 2.5)
    assert inspector.check(make_key(0)) is None
    assert 100 < found.expires_at - time.time() <= 200
    (again,) = inspector.find()
    assert again.expires_at - time.time() <= 200
    inspector.delete(make_key(0))
    assert list(tier.keys()) == []
    tier.close()
    inspector.close()


@pytest.mark.parametrize("how", ["replica", "acl"])
def test_an_entry_that_redis_keeps_is_not_called_deleted(redis_server: RedisServer, how: str) -> None:
    tier = RedisTier(redis_server.url)
    put(tier, 0, Lease(time.time(), 300, 2.5))
    tier.close()
    inspector = RedisInspector(redis_server.refuse(how))
    with pytest.raises(FileError, match="Redis refused to delete an entry"):
        inspector.delete(make_key(0))
    inspector.close()


def test_an_entry_that_a_folder_keeps_is_not_called_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    put(tier, 0, Lease(time.time(), 300, 2.5))
    tier.close()
    inspector = FolderInspector(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(FileError, match="cannot be deleted"):
        inspector.delete(make_key(0))
    inspector.close()


def test_a_redis_that_does_not_answer_is_told(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    with pytest.raises(InputError, match="no Redis server answers"):
        RedisInspector(f"unix://{tmp_path}/nobody")
