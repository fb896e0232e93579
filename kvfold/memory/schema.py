"""The SQLite file of a memory: tables, version, and how it is opened.

Every connection overwrites what it deletes (`secure_delete`) and keeps temporary tables in memory, so that no text of a
forgotten fact stays in a file. A file is readable by its owner alone (mode 0600).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfold.errors import FileError

VERSION = 1
APPLICATION_ID = 0x6B76666D  # "kvfm"
BUSY_SECONDS = 30.0  # that a process waits for another's write
_TABLES = """
CREATE TABLE owner (
    key INTEGER PRIMARY KEY AUTOINCREMENT, -- never given twice, so that an index notices whose facts are gone
    tenant TEXT NOT NULL,
    user TEXT NOT NULL,
    next_id INTEGER NOT NULL DEFAULT 1,
    revision INTEGER NOT NULL DEFAULT 0, -- counts changes of facts; each fact has that of its last
    epoch INTEGER NOT NULL DEFAULT 0,    -- counts removals
    recalls INTEGER NOT NULL DEFAULT 0,
    banked INTEGER NOT NULL DEFAULT 0,   -- the last id that the bank of slots has taken in
    UNIQUE (tenant, user)
);
CREATE TABLE fact (
    owner INTEGER NOT NULL REFERENCES owner (key) ON DELETE CASCADE,
    id INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    subject TEXT NOT NULL, -- of kvfold/memory/statement.py, by which facts are compared; empty: not told
    verb TEXT NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL,
    source TEXT NOT NULL,
    start INTEGER NOT NULL,
    "end" INTEGER NOT NULL,
    valid_from REAL NOT NULL,
    valid_to REAL,
    importance REAL NOT NULL DEFAULT 1,
    uses INTEGER NOT NULL DEFAULT 0,
    supersedes INTEGER,
    embedder TEXT NOT NULL,
    embedding BLOB NOT NULL,
    PRIMARY KEY (owner, id)
);
CREATE INDEX fact_changes ON fact (owner, revision);
CREATE INDEX fact_subjects ON fact (owner, subject, text);
CREATE TABLE slot ( -- of the owner's bank of slots, kvfold/memory/slots.py
    owner INTEGER NOT NULL REFERENCES owner (key) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    fact INTEGER NOT NULL,
    line TEXT NOT NULL,
    PRIMARY KEY (owner, number)
);
CREATE TABLE prefix ( -- the lines that a stored KV prefix was made from
    owner INTEGER NOT NULL REFERENCES owner (key) ON DELETE CASCADE,
    name TEXT NOT NULL,
    lines TEXT NOT NULL,
    PRIMARY KEY (owner, name)
);
CREATE TABLE pending (job TEXT PRIMARY KEY);
"""


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """Errors of SQLite as one sentence."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: names and texts of a damaged file
        raise _told(path, error) from None


def connect(path: Path) -> sqlite3.Connection:
    """Open or make the file; FileError for one that is damaged, foreign, or of another version."""
    _make(path)
    connection = None
    try:
        with telling(path):
            connection = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            _prepare(connection, path)
            return connection
    except FileError:
        if connection is not None:
            connection.close()
        raise


def make_folder(path: Path) -> None:
    """The folder of a memory, for its owner alone."""
    with _opening(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _make(path: Path) -> None:
    """A new file is made, and an empty one made private: SQLite gives its log the same mode."""
    with _opening(path):
        if not path.parent.is_dir():
            raise FileError(f"the folder {path.parent} of the memory does not exist; name one that does")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise FileError(f"{path} is a device or a pipe; name a file for the memory")
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        if not path.stat().st_size:
            path.chmod(0o600)


def _make_private(path: Path) -> None:
    """Mode 0600 of the file and its log, once it is known whose they are."""
    with _opening(path):
        for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
            if file.exists():
                file.chmod(0o600)


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"the memory {path} cannot be opened ({error.strerror}); name a file you own") from None


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    run = connection.execute
    run("PRAGMA temp_store = MEMORY")
    run("PRAGMA foreign_keys = ON")
    run("PRAGMA trusted_schema = OFF")
    run("PRAGMA cell_size_check = ON")
    (is_empty,) = run("SELECT count(*) = 0 FROM sqlite_master").fetchone()
    if not is_empty:
        _check(connection, path)
        _check_pages(connection, path)
        _make_private(path)
    run("PRAGMA secure_delete = ON")
    run("PRAGMA journal_mode = WAL")
    run("PRAGMA synchronous = NORMAL")
    if is_empty:
        _create(connection, path)


def _create(connection: sqlite3.Connection, path: Path) -> None:
    """Unless another process was quicker."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        (is_empty,) = connection.execute("SELECT count(*) = 0 FROM sqlite_master").fetchone()
        if is_empty:
            for statement in _TABLES.strip().removesuffix(";").split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    _check(connection, path)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise FileError(f"{path} is an SQLite file of another program; name a new file for the memory")
    if version != VERSION:
        raise FileError(f"{path} has version {version} of a memory and this kvfold reads {VERSION}; use another file")


def _check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Pages that are damaged are told at once, before facts are written beside them; text is not checked."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise _told(path, sqlite3.DatabaseError(found.splitlines()[-1]))


def _told(path: Path, error: Exception) -> FileError:
    text = str(error)
    if "locked" in text or "busy" in text:
        return FileError(f"the memory {path} is in use by another process ({text}); try again later")
    if "unable to open" in text or "readonly" in text or "full" in text or "I/O" in text:
        return FileError(f"the memory {path} cannot be used ({text}); check the disk and whose file it is")
    return FileError(f"the memory {path} is damaged or no SQLite file ({text}); restore a copy or name another file")
