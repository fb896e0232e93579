"""The folder: found again after a restart, whole after a kill, and no harm where the disk is full."""

from __future__ import annotations

import fcntl
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest

from kvfold.errors import FileError, KvfoldWarning
from kvfold.store.entry.format import EntryReader
from kvfold.store.events import Event
from kvfold.store.tiers.disk import DiskTier
from kvfold.store.tiers.eviction import Lease
from tests.store.common import BINDING, Clock, entry_files, make_entry, make_key

LIMIT = 1 << 20
KILLS = 102  # six times at each of the moments


def put(tier: DiskTier, number: int, lease: Lease) -> None:
    assert tier.put(make_key(number), make_entry(make_key(number), lease), lease)


def read_whole(tier: DiskTier, number: int, at: float) -> list[str]:
    """Names of the blocks, each checked."""
    file = tier.get(make_key(number), at)
    assert file is not None
    with file:
        return [name for name, _ in EntryReader(file, make_key(number), BINDING).blocks()]


def test_a_restart_finds_entries_with_their_lives_and_worth(tmp_path: Path) -> None:
    clock = Clock()
    tier = DiskTier(tmp_path, LIMIT, clock=clock)
    for number, saved_s in enumerate((3.0, 1.0, 2.0)):
        put(tier, number, Lease(clock.now, 300, saved_s))
    clock.now += 200
    tier.touch(make_key(0), clock.now)
    tier.close()
    again = DiskTier(tmp_path, LIMIT, clock=clock)
    assert {make_key(number) for number in range(3)} == set(again.keys())
    assert again._evictor.least_valuable() == make_key(1)
    clock.now += 150  # the first one was used; the others have expired
    assert read_whole(again, 0, clock.now) == ["0", "1"]
    assert again.get(make_key(1), clock.now) is None and again.get(make_key(2), clock.now) is None
    again.close()


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LIMIT)
    for number in range(20):
        put(tier, number, Lease(time.time(), 300, 1.0))
    size = tier.num_bytes
    tier.close()
    again = DiskTier(tmp_path, size // 3)
    assert 0 < len(list(again.keys())) < 20 and again.num_bytes <= size // 3
    again.close()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LIMIT)
    with pytest.raises(FileError, match="is in use by another store"):
        DiskTier(tmp_path, LIMIT)
    tier.close()
    DiskTier(tmp_path, LIMIT).close()


def test_whoever_only_asks_for_the_owner_refuses_nobody(tmp_path: Path) -> None:
    """`kvfold cache stats` holds the lock while it asks; whoever is to own the folder outlasts that."""
    DiskTier(tmp_path, LIMIT).close()
    asking = (tmp_path / "lock").open()
    fcntl.flock(asking, fcntl.LOCK_SH)
    threading.Timer(0.05, asking.close).start()
    DiskTier(tmp_path, LIMIT).close()
    assert asking.closed


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be used as a store"):
        DiskTier(tmp_path / "file" / "store", LIMIT)


def test_nobody_else_can_read_what_is_stored(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "store", LIMIT)
    put(tier, 1, Lease(time.time(), 300, 1.0))
    (file,) = entry_files(tmp_path / "store")
    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "store" / "entries").stat().st_mode & 0o777 == 0o700
    tier.close()


def test_files_that_vanish_are_not_there(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LIMIT)
    put(tier, 1, Lease(time.time(), 300, 1.0))
    entry_files(tmp_path)[0].unlink()
    assert tier.get(make_key(1), time.time()) is None and list(tier.keys()) == []
    put(tier, 1, Lease(time.time(), 300, 1.0))
    assert read_whole(tier, 1, time.time()) == ["0", "1"]
    tier.close()


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LIMIT)
    put(tier, 1, Lease(time.time(), 300, 1.0))
    tier.close()
    strange = entry_files(tmp_path)[0].with_name("notes.txt")
    strange.write_text("mine")
    again = DiskTier(tmp_path, LIMIT)
    assert list(again.keys()) == [make_key(1)] and strange.read_text() == "mine"
    again.close()


def test_a_full_disk_costs_the_entry_and_nothing_else(tmp_path: Path) -> None:
    """The kernel refuses to write more than so many bytes to a file, half-way through."""
    tier, events = DiskTier(tmp_path, LIMIT), list[Event]()
    tier.events.subscribe(events.append)
    put(tier, 1, Lease(time.time(), 300, 1.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        assert not tier.put(make_key(2), make_entry(make_key(2), Lease(0, 1, 1)), Lease(time.time(), 300, 1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(event.kind, event.reason) for event in events] == [("stored", None), ("failed", "unavailable")]
    assert tier.get(make_key(2), time.time()) is None and read_whole(tier, 1, time.time()) == ["0", "1"]
    assert len([path for path in tmp_path.rglob("*.*") if path.is_file()]) == 1
    put(tier, 2, Lease(time.time(), 300, 1.0))
    tier.close()


def test_a_kill_loses_at_most_the_entry_being_written(tmp_path: Path) -> None:
    """In a process of its own, which forks one writer after the other and kills each while it writes."""
    command = [sys.executable, "-m", "tests.store.kills", str(tmp_path), str(KILLS)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) >= KILLS


@pytest.mark.parametrize("made_anew", [True, False])
def test_an_owner_whose_folder_was_deleted_uses_it_no_more(tmp_path: Path, made_anew: bool) -> None:
    """Its lock is on a file that has no name any more; whoever makes the folder anew owns that one alone."""
    folder, lease, events = tmp_path / "store", Lease(time.time(), 300, 1.0), list[Event]()
    tier = DiskTier(folder, LIMIT)
    put(tier, 1, lease)
    shutil.rmtree(folder)
    other = DiskTier(folder, LIMIT) if made_anew else None
    if other is not None:
        put(other, 1, lease)
    tier.events.subscribe(events.append)
    with pytest.warns(KvfoldWarning, match="is no longer used"):
        assert tier.get(make_key(1), time.time()) is None
    assert not tier.put(make_key(2), make_entry(make_key(2), lease), lease)
    tier.delete(make_key(1))
    assert [(event.kind, event.reason) for event in events] == [("failed", "unavailable")]
    assert len(entry_files(folder)) == (1 if made_anew else 0) and list(tier.keys()) == []
    tier.close()
    if other is not None:
        assert read_whole(other, 1, time.time()) == ["0", "1"]
        with pytest.raises(FileError, match="in use by another store"):
            DiskTier(folder, LIMIT)
        other.close()


def test_a_lock_on_a_file_that_was_replaced_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, flock = tmp_path / "lock", fcntl.flock

    def replace_then_lock(file: TextIO, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        lock.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", replace_then_lock)
    tier = DiskTier(tmp_path, LIMIT)
    with pytest.raises(FileError, match="in use by another store"):
        DiskTier(tmp_path, LIMIT)
    tier.close()
