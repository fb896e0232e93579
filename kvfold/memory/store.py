"""Facts in SQLite: what is read and written, always of one owner.

One connection serves all threads under a lock; processes wait for each other by SQLite's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from kvfold.memory.fact import Fact, Owner
from kvfold.memory.schema import connect, telling

_COLUMNS = 'id, text, source, start, "end", valid_from, valid_to, importance, uses, embedder, embedding'
_INSERT = f"INSERT INTO fact (owner, revision, {_COLUMNS}) VALUES ({', '.join('?' * 13)})"


class Version(NamedTuple):
    """What changes with an owner's facts; `epoch` with those that are removed."""

    key: int
    epoch: int
    revision: int
    recalls: int


class FactStore:
    """The facts of many owners in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = RLock()
        self._connection = connect(path)
        self._is_writing = False

    def close(self) -> None:
        with self._lock:
            self._connection.close()

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

    # Reading

    def version(self, owner: Owner) -> Version | None:
        """None for an owner without facts."""
        sql = "SELECT key, epoch, revision, recalls FROM owner WHERE tenant = ? AND user = ?"
        with self._lock, telling(self.path):
            row = self._connection.execute(sql, owner).fetchone()
        return None if row is None else Version(*row)

    def changed(self, owner: Owner, key: int, after: int) -> Iterator[tuple[int, Fact]]:
        """Facts that changed after a revision, with theirs, by id."""
        sql = f"SELECT revision, {_COLUMNS} FROM fact WHERE owner = ? AND revision > ? ORDER BY id"
        with self._lock, telling(self.path):
            rows = self._connection.execute(sql, (key, after)).fetchall()
        for revision, number, *rest in rows:
            yield revision, Fact(number, owner.user, *rest)

    def owners(self, tenant: str) -> list[tuple[str, int]]:
        """Users of a tenant and how many facts each has."""
        sql = """SELECT user, count(fact.id) FROM owner LEFT JOIN fact ON fact.owner = owner.key
            WHERE tenant = ? GROUP BY owner.key ORDER BY user"""
        with self._lock, telling(self.path):
            return self._connection.execute(sql, (tenant,)).fetchall()

    # Writing

    def insert(self, owner: Owner, fact: Fact) -> Fact:
        """The fact with its id; the owner is made where there is none."""
        with self.writing():
            key, number, revision = self._next(owner)
            values = (fact.text, fact.source, fact.start, fact.end, fact.valid_from, fact.valid_to)
            more = (fact.importance, fact.uses, fact.embedder, fact.embedding)
            self._connection.execute(_INSERT, (key, revision, number, *values, *more))
        return Fact(number, owner.user, *values, *more)

    def close_facts(self, owner: Owner, ends: Iterable[tuple[int, float]]) -> None:
        """Set `valid_to` of facts by id."""
        sql = "UPDATE fact SET valid_to = ?, revision = ? WHERE owner = ? AND id = ?"
        with self.writing():
            for number, end in ends:
                key, revision = self._changed(owner)
                self._connection.execute(sql, (end, revision, key, number))

    def _next(self, owner: Owner) -> tuple[int, int, int]:
        """Key, the id of a new fact, and its revision."""
        run = self._connection.execute
        run("INSERT INTO owner (tenant, user) VALUES (?, ?) ON CONFLICT DO NOTHING", owner)
        key, revision = self._changed(owner)
        (number,) = run("SELECT next_id FROM owner WHERE key = ?", (key,)).fetchone()
        run("UPDATE owner SET next_id = next_id + 1 WHERE key = ?", (key,))
        return key, number, revision

    def _changed(self, owner: Owner) -> tuple[int, int]:
        """Key and the next revision of an owner who is there."""
        run = self._connection.execute
        run("UPDATE owner SET revision = revision + 1 WHERE tenant = ? AND user = ?", owner)
        key, revision = run("SELECT key, revision FROM owner WHERE tenant = ? AND user = ?", owner).fetchone()
        return key, revision

    def count_recall(self, owner: Owner, ids: Sequence[int]) -> None:
        """A recall of some facts: their `uses` and the owner's `recalls` grow by one."""
        with self.writing():
            run = self._connection.execute
            run("UPDATE owner SET recalls = recalls + 1 WHERE tenant = ? AND user = ?", owner)
            sql = "UPDATE fact SET uses = uses + 1 WHERE id = ? AND owner = "
            sql += "(SELECT key FROM owner WHERE tenant = ? AND user = ?)"
            self._connection.executemany(sql, [(number, *owner) for number in ids])
