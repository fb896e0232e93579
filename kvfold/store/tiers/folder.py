"""Folder locks (flock), exclusive or shared, and atomic entry writes of the disk tiers.

The kernel releases the lock when the process ends. It is on the file, not on its name: after the folder is deleted and
recreated, the old lock does not hold the new one. Entries contain prompt data, so only the owner can read the files.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from kvfold.atomic_io import replacing
from kvfold.errors import FileError

_PATIENCE_S = 0.5  # `is_locked` holds the lock for a moment
_PAUSE_S = 0.02
_MOST_TRIES = 8


def lock_folder(folder: Path, private: Path, *, shared: bool = False) -> TextIO:
    """Create the folder and its `private` subfolder (mode 700) and lock it until the returned file is closed; `shared`
    with other processes that share it, against those that lock it alone."""
    for _ in range(_MOST_TRIES):
        file = _locked(folder, private, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        if holds_lock(file, folder):
            return file
        file.close()  # it was deleted before it was locked
    raise FileError(f"{folder} is deleted again and again by another process; choose another folder")


def holds_lock(file: TextIO, folder: Path) -> bool:
    """Whether the file of `lock_folder` is still the folder's lock."""
    try:
        return not file.closed and os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock"))
    except OSError:
        return False


def _locked(folder: Path, private: Path, how: int) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        private.mkdir(exist_ok=True, mode=0o700)
        file = (folder / "lock").open("a")
    except OSError as error:
        raise FileError(f"{folder} cannot be used as a store ({error}); choose another folder") from error
    try:
        _lock(file, how)
    except OSError as error:
        file.close()
        raise FileError(f"{folder} is in use by another store; close that one, or choose another folder") from error
    return file


def _lock(file: TextIO, how: int) -> None:
    """OSError if another process keeps the lock for _PATIENCE_S."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(_PAUSE_S)


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder's lock now."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def write_entry(path: Path, data: bytes, expires_at: float) -> None:
    """Atomic and durable: temporary file, sync, rename, folder sync. FileError or OSError on failure."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)
        set_expiry(temporary, expires_at)
    _sync_folder(path.parent)


def set_expiry(path: Path, expires_at: float) -> None:
    """The modification time is the expiry."""
    os.utime(path, (expires_at, expires_at))


def _sync_folder(folder: Path) -> None:
    """A rename is durable once the folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
