"""The journal of a reading: replies as they come, so that a run that was killed goes on with what is done.

An append-only file of JSON lines, synced after each batch. The first line names the run (a digest of text, question,
model, policy and options); every other one has a digest of its prompt and the reply to it. A line that was torn by a
kill is cut off. Nothing in it is trusted: a line of another form is refused, and a reply is only ever text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from kvfold.errors import FileError, InputError

try:
    import fcntl
except ImportError:  # on Windows, where a file that is open elsewhere cannot be removed, nobody is kept out
    fcntl = None  # type: ignore[assignment]

_FORMAT = "kvfold-read-1"
_OPENING = json.dumps({"format": _FORMAT}).encode()[:-1]
_MAX_BYTES = 1 << 30
_MAX_REPLY = 1 << 20  # characters
_MAX_TOKENS = 1 << 53
_MAX_AGE_S = 30 * 86_400.0


class Recorded(NamedTuple):
    """What a model replied, how many tokens its call read, and whether the token limit cut the reply."""

    text: str
    num_tokens: int
    is_cut: bool = False


def digest(parts: Mapping[str, object]) -> str:
    """SHA-256 over named parts, in any order."""
    return hashlib.sha256(json.dumps(dict(sorted(parts.items())), default=str).encode()).hexdigest()


class Journal:
    """An open journal, locked against other processes. Close it, or use it in a `with` statement."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self._replies = path, dict[str, Recorded]()
        self._file = _open(path)
        try:
            self._lock()
            self._load(key)
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def open(cls, path: Path, key: str) -> Self:
        """The journal of this run at `path`, which is made if need be; FileError if it is of another run."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path, key)
        except OSError as error:
            told = f"{path} cannot be used as a journal ({error.strerror}); name another file with --resume"
            raise FileError(told) from None

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process is reading the same text with the same question (journal {self.path}); wait for it, "
                "or name another journal with --resume"
            ) from None

    def _load(self, key: str) -> None:
        if os.fstat(self._file.fileno()).st_size > _MAX_BYTES:
            raise FileError(f"{self.path} is larger than any journal; remove it, or name another file")
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        header = {"format": _FORMAT, "run": key}
        if not lines and json.dumps(header).encode().startswith(content):  # new, or killed while it was made
            self._file.truncate(0)
            self._write([header])
            return
        if not (lines or [content])[0].startswith(_OPENING):
            raise FileError(f"{self.path} is no journal of kvfold read; name another file")
        if not lines or self._parsed(lines[0], 1) != header:
            raise FileError(
                f"{self.path} is no journal of this text, question, model and options; name another file, or remove it"
            )
        for number, line in enumerate(lines[1:], 2):
            row = self._parsed(line, number)
            call, text, num_tokens = (row.get(name) for name in ("call", "reply", "num_tokens"))
            if not isinstance(call, str) or not isinstance(text, str) or type(num_tokens) is not int:
                raise self._damaged(number)
            is_cut = row.get("is_cut", False)
            if len(text) > _MAX_REPLY or not 0 <= num_tokens < _MAX_TOKENS or not isinstance(is_cut, bool):
                raise self._damaged(number)
            self._replies[call] = Recorded(text, num_tokens, is_cut)
        self._file.truncate(len(whole))

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise self._damaged(number) from None
        if not isinstance(row, dict):
            raise self._damaged(number)
        return row

    def _damaged(self, number: int) -> FileError:
        return FileError(f"line {number} of {self.path} is damaged; remove the file to read the text anew")

    def __len__(self) -> int:
        return len(self._replies)

    def get(self, call: str) -> Recorded | None:
        """The reply to a prompt, if it is there."""
        return self._replies.get(call)

    def add(self, replies: Iterable[tuple[str, Recorded]]) -> None:
        """Append replies and sync them."""
        found = list(replies)
        self._write(
            [
                {"call": call, "reply": reply.text, "num_tokens": reply.num_tokens, "is_cut": reply.is_cut}
                for call, reply in found
            ]
        )
        self._replies.update(found)

    def _write(self, rows: Iterable[Mapping[str, object]]) -> None:
        """All rows, or none: on a disk that is almost full a write takes a part, and only the next one fails."""
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        before = os.fstat(self._file.fileno()).st_size
        try:
            while content:
                content = content[self._file.write(content) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(before)
            raise FileError(f"{self.path} cannot be written ({error.strerror}); make room, or name another") from None

    def remove(self) -> None:
        """Close and delete it: the reading is complete."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_old(folder: Path, now: float) -> None:
    """Delete journals, which quote their texts, of runs that nobody has gone on with for 30 days."""
    for path in folder.glob("*.jsonl"):
        with suppress(OSError):
            if now - path.stat().st_mtime > _MAX_AGE_S:
                path.unlink()


def _open(path: Path) -> IO[bytes]:
    """For reading, and for writing behind the end; a new one, which quotes the text, is readable by its owner alone."""
    if path.is_dir():
        raise FileError(f"{path} is a folder; name a file for the journal")
    if path.exists() and not path.is_file():
        raise FileError(f"{path} is a device or a pipe; name a file for the journal")
    found = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b", buffering=0)
    found.seek(0)
    return found
