"""A folder that several processes use at once: what one writes the others read, and the limit holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvfold.errors import FileError
from kvfold.store.entry.format import EntryReader
from kvfold.store.tiers.disk import DiskTier, path_of
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.store.common import BINDING, Clock, make_entry, make_key

ROOT = Path(__file__).resolve().parents[3]


def put(tier: SharedDiskTier, number: int, lease: Lease) -> int:
    data = make_entry(make_key(number), lease)
    assert tier.put(make_key(number), data, lease)
    return len(data)


def test_two_tiers_see_each_other_s_entries(tmp_path: Path) -> None:
    first, second = SharedDiskTier(tmp_path), SharedDiskTier(tmp_path)
    put(first, 0, Lease(time.time(), 60, 0))
    put(second, 1, Lease(time.time(), 60, 0))
    assert second.num_leading([make_key(i) for i in range(4)]) == 2
    file = second.get(make_key(0), time.time())
    assert file is not None
    with file:
        assert len(list(EntryReader(file, make_key(0), BINDING).blocks())) == 2
    first.delete(make_key(1))
    assert not second.has(make_key(1)) and second.get(make_key(1), time.time()) is None
    assert set(second.keys()) == {make_key(0)}


def test_a_read_prolongs_and_a_look_does_not(tmp_path: Path) -> None:
    clock = Clock()
    tier = SharedDiskTier(tmp_path, clock=clock)
    put(tier, 0, Lease(clock.now, 100, 0))
    put(tier, 1, Lease(clock.now, 100, 0))
    clock.now += 90
    assert tier.has(make_key(0)) and tier.has(make_key(1))
    tier.touch(make_key(0), clock.now)
    clock.now += 50
    assert tier.has(make_key(0)) and not tier.has(make_key(1))
    assert tier.get(make_key(1), clock.now) is None


def test_what_expires_first_makes_room(tmp_path: Path) -> None:
    free = SharedDiskTier(tmp_path / "free")
    size = put(free, 0, Lease(time.time(), 60, 0))
    tier = SharedDiskTier(tmp_path / "bounded", 10 * size + 9)
    now = time.time()
    for number in range(40):
        put(tier, number, Lease(now + number, 60, 0))
        keys = list(tier.keys())
        assert sum(path_of(tier.folder, key).stat().st_size for key in keys) <= 10 * size + 9
    assert make_key(39) in set(tier.keys()) and make_key(0) not in set(tier.keys())
    assert not tier.put(make_key(99), b"x" * (11 * size), Lease(now, 60, 0))


def test_a_folder_is_shared_or_owned(tmp_path: Path) -> None:
    shared = SharedDiskTier(tmp_path)
    with pytest.raises(FileError, match="in use by another store"):
        DiskTier(tmp_path, 1 << 20)
    shared.close()
    owner = DiskTier(tmp_path, 1 << 20)
    with pytest.raises(FileError, match="in use by another store"):
        SharedDiskTier(tmp_path)
    owner.close()
    SharedDiskTier(tmp_path).close()


def test_a_deleted_folder_takes_no_entries(tmp_path: Path) -> None:
    tier = SharedDiskTier(tmp_path / "gone")
    (tmp_path / "gone").rename(tmp_path / "moved")
    assert not tier.put(make_key(0), b"x", Lease(time.time(), 60, 0))
    assert tier.get(make_key(0), time.time()) is None and not (tmp_path / "gone").exists()


_WRITER = """
import sys, time
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.store.common import make_entry, make_key
tier = SharedDiskTier(sys.argv[1])
while True:
    for number in range(20):
        lease = Lease(time.time(), 600, 0)
        tier.put(make_key(number), make_entry(make_key(number), lease, num_layers=30), lease)
"""


def test_killed_writers_leave_whole_entries(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    writers = [subprocess.Popen(command, env=environment) for _ in range(2)]
    tier = SharedDiskTier(tmp_path)
    try:
        until = time.monotonic() + 60
        while len(list(tier.keys())) < 20 and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    keys = list(tier.keys())
    assert len(keys) == 20
    for key in keys:
        file = tier.get(key, time.time())
        assert file is not None
        with file:
            assert len(list(EntryReader(file, key, BINDING).blocks())) == 30
