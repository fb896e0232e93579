"""An SQLite file with transactions, shared by threads and processes, out of which deleted text can be scrubbed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any, Self

from kvfold.errors import FileError
from kvfold.memory.schema import connect, telling


class Database:
    """An open file. One connection serves all threads under a lock; processes wait for each other by SQLite's own."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))  # whatever link led here: logs and prefixes stand beside the file
        self._lock = RLock()
        self._connection = connect(self.path)
        self._is_writing = False
        if self.rows("SELECT job FROM pending"):  # a process was killed while it forgot
            with suppress(FileError):  # another process reads; the next one that opens it tries again
                self.scrub()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction: all of it is written, or nothing. No other process writes meanwhile."""
        with self._lock, telling(self.path):
            if self._is_writing:
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            self._is_writing = True
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._is_writing = False

    def rows(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """All rows of a statement."""
        with self._lock, telling(self.path):
            return self._connection.execute(sql, values).fetchall()

    def write_rows(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        """A statement for each row of values, in one transaction."""
        with self.writing():
            self._connection.executemany(sql, rows)

    def must_scrub(self) -> None:
        """Note in this transaction that `scrub` has to follow, whatever becomes of the process."""
        self._connection.execute("INSERT INTO pending VALUES ('scrub') ON CONFLICT DO NOTHING")

    def scrub(self) -> None:
        """Rewrite the file without free pages, and empty its log."""
        with self._lock, telling(self.path):
            self._connection.execute("VACUUM")
            self._empty_log()
            self._connection.execute("DELETE FROM pending")
            self._empty_log()

    def _empty_log(self) -> None:
        is_busy, *_ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            raise FileError(
                f"facts are deleted, but the log of {self.path} cannot be emptied while another process reads it; "
                "end that process, or run forget again"
            )
