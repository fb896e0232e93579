"""Files of stored KV prefixes: a private folder beside the memory's file, named by digests of whose and of what.

memory.db.kv/<digest of tenant and user>-<digest of weights, policy and slots>.kvfold
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from kvfold.errors import FileError
from kvfold.memory.fact import Owner

_ZEROS = bytes(1 << 16)


def prefix_folder(path: Path) -> Path:
    """Of the memory in a file."""
    return path.with_name(f"{path.name}.kv")


def owner_digest(owner: Owner) -> str:
    return hashlib.sha256("\0".join(owner).encode()).hexdigest()[:32]


def prefix_path(path: Path, owner: Owner, name: str) -> Path:
    """Where a prefix is kept; its folder is made."""
    folder = prefix_folder(path)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise FileError(f"the folder {folder} cannot be made ({error.strerror}); check whose it is") from None
    return folder / f"{owner_digest(owner)}-{name}.kvfold"


def remove_prefixes(path: Path, owner: Owner) -> None:
    """Overwrite and delete all prefixes of an owner, also one that a killed process had begun to write."""
    for file in _prefixes(prefix_folder(path), owner):
        try:
            with suppress(FileNotFoundError):  # another process forgets, too
                _overwrite(file)
            file.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"the stored prefix {file} cannot be removed ({error.strerror}); remove it") from None


def _prefixes(folder: Path, owner: Owner) -> list[Path]:
    """Prefixes of an owner; FileError for a folder that cannot be looked into, since they would stay."""
    try:
        return [file for file in folder.iterdir() if f"{owner_digest(owner)}-" in file.name]
    except FileNotFoundError:
        return []
    except OSError as error:
        why = f"stored prefixes in {folder} cannot be removed ({error.strerror}), so nothing is forgotten"
        raise FileError(f"{why}; check whose folder it is") from None


def _overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        left = file.stat().st_size
        while left > 0:
            left -= opened.write(_ZEROS[:left])
        opened.flush()
        os.fsync(opened.fileno())
