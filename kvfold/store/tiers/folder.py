"""A folder that one process owns, and files in it that are whole or not there.

Owning is a lock the kernel drops with the process, however it ends. It is on a file, not on its name: where somebody
deletes the folder and makes it anew, whoever had it owns nothing that can be found. What is stored was read from
somebody's prompts, so nobody else may read it.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from kvfold.atomic_io import replacing
from kvfold.errors import FileError

_PATIENCE_S = 0.5  # somebody who only asks whether a folder is owned holds its lock for a moment
_PAUSE_S = 0.02
_MOST_TRIES = 8


def own(folder: Path, private: Path) -> TextIO:
    """Make the folder, and in it one that nobody else may look into; own both until the file returned is closed."""
    for _ in range(_MOST_TRIES):
        file = _locked(folder, private)
        if owns(file, folder):
            return file
        file.close()  # somebody deleted it before it was locked
    raise FileError(f"{folder} is deleted again and again by somebody else; choose another folder")


def owns(file: TextIO, folder: Path) -> bool:
    """Whether what `own` returned is still the folder's lock."""
    try:
        return not file.closed and os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock"))
    except OSError:
        return False


def _locked(folder: Path, private: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        private.mkdir(exist_ok=True, mode=0o700)
        file = (folder / "lock").open("a")
    except OSError as error:
        raise FileError(f"{folder} cannot be used as a store ({error}); choose another folder") from error
    try:
        _lock(file)
    except OSError as error:
        file.close()
        raise FileError(f"{folder} is in use by another store; close that one, or choose another folder") from error
    return file


def _lock(file: TextIO) -> None:
    """For this process alone; OSError if another one does not let go of it soon."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(_PAUSE_S)


def is_owned(folder: Path) -> bool:
    """Whether a process owns the folder now."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def write_whole(path: Path, data: bytes, expires_at: float) -> None:
    """Under its name or not at all, and the folder synced; FileError or OSError where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)
        set_expiry(temporary, expires_at)
    _sync_folder(path.parent)


def set_expiry(path: Path, expires_at: float) -> None:
    """The time of modification says when an entry expires."""
    os.utime(path, (expires_at, expires_at))


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk once the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
