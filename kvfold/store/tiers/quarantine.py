"""Quarantine folder of invalid entries, each with its reason, for inspection; bounded in bytes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from threading import Lock

from kvfold.store.key import Key

LIMIT_BYTES = 256 << 20


class Quarantine:
    """The newest `limit_bytes`: KEY.kvp has an entry's bytes, KEY.txt the reason."""

    def __init__(self, folder: str | Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self._lock = Lock()

    def keep(self, key: Key, data: bytes, why: str) -> None:
        """Never raises: an entry that cannot be written is dropped."""
        with self._lock, suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            note = f"{why}\n".encode()
            self._make_room(len(data) + len(note))
            (self.folder / f"{key.text}.txt").write_bytes(note)
            if len(data) + len(note) <= self.limit_bytes:
                (self.folder / f"{key.text}.kvp").write_bytes(data)

    def _make_room(self, num_bytes: int) -> None:
        files = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total + num_bytes <= self.limit_bytes:
                return
            total -= path.stat().st_size
            path.unlink()
