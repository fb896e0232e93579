"""Faults of a store, each defined once for all drivers of the suite (tests/store/fault_suite.py)."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from kvfold.atomic_io import TEMPORARY
from tests.store.common import overwrite
from tests.store.servers import RedisServer

ROOT = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).with_name("fault_hook")

# What happens to files while nobody uses them


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    overwrite(path, bytes(data))


def _swap(first: Path, second: Path) -> None:
    a, b = first.read_bytes(), second.read_bytes()
    overwrite(first, b)
    overwrite(second, a)


def _half_written(path: Path) -> None:
    """As a writer that was killed leaves it."""
    path.with_suffix(TEMPORARY).write_bytes(path.read_bytes()[:100])
    path.unlink()


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


Chunks = Sequence[Path]  # files of the whole chunks of a prompt, in order
DAMAGE: dict[str, Callable[[Chunks, Chunks], object]] = {  # what happens to a prompt's chunks; those of another prompt
    "a flipped bit in the first block": lambda own, other: _flip(own[0], -100),
    "a flipped bit in the last block": lambda own, other: _flip(own[-1], -1),
    "a flipped bit in the header": lambda own, other: _flip(own[0], 60),
    "a flipped bit in the preamble": lambda own, other: _flip(own[0], 9),
    "cut in half": lambda own, other: overwrite(own[0], own[0].read_bytes()[: own[0].stat().st_size // 2]),
    "empty": lambda own, other: overwrite(own[0], b""),
    "more behind the end": lambda own, other: overwrite(own[0], own[0].read_bytes() + b"more"),
    "two entries swapped": lambda own, other: _swap(own[0], own[1]),
    "the entry of another prompt": lambda own, other: overwrite(own[0], other[0].read_bytes()),
    "missing": lambda own, other: own[0].unlink(),
    "half written": lambda own, other: _half_written(own[0]),
    "past its time": lambda own, other: os.utime(own[0], (time.time() - 5, time.time() - 5)),
    "a folder in its place": lambda own, other: _folder_instead(own[0]),
}
NOT_REPAIRED = ("a folder in its place",)


# What happens to the disk while entries are written


class Place:
    """Folders of a driver: `disk` for its entries, on a file system of its own where this process may mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk, self.hooks = folder, folder / "disk", folder / "hooks"
        self.disk.mkdir()
        self.hooks.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(self.disk)]
        with suppress(OSError):
            subprocess.run(mount, stderr=subprocess.DEVNULL, check=False)
        self.is_mounted = os.path.ismount(self.disk)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.disk)], check=True)

    @property
    def environment(self) -> dict[str, str]:
        """Of processes whose writers this place may stop."""
        return {"KVFOLD_FAULTS": str(self.hooks), "PYTHONPATH": f"{HOOK}{os.pathsep}{ROOT}"}


@contextmanager
def _full_disk(place: Place, _: Sequence[int]) -> Iterator[None]:
    """Every write to it fails with ENOSPC."""
    ballast = place.disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    assert os.statvfs(place.disk).f_bavail == 0
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def _limited(_: Place, pids: Sequence[int]) -> Iterator[None]:
    """A write beyond 2,048 bytes of a file fails with EFBIG, in its middle."""
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_soft, hard) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (2048, hard))
    try:
        yield
    finally:
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


FULL = "a full disk"
DISK: dict[str, Callable[[Place, Sequence[int]], AbstractContextManager[None]]] = {
    FULL: _full_disk,
    "a limit on the size of files": _limited,
}

# What happens to Redis while it is used


@contextmanager
def _read_only(server: RedisServer) -> Iterator[None]:
    server.refuse("replica")
    try:
        yield
    finally:
        server.ask("REPLICAOF", "NO", "ONE")


@contextmanager
def _hanging(server: RedisServer) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def _killed(server: RedisServer) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


READ_ONLY = "Redis refuses writes"
REDIS: dict[str, Callable[[RedisServer], AbstractContextManager[None]]] = {
    READ_ONLY: _read_only,
    "Redis hangs": _hanging,
    "Redis is killed": _killed,
}
