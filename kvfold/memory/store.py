"""Facts in SQLite: what is read and written, always of one owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvfold.errors import InputError
from kvfold.memory.database import Database
from kvfold.memory.fact import Fact, Owner
from kvfold.memory.rows import COLUMNS, fact_of
from kvfold.memory.verbs import CHANGE

MAX_FACTS = 100_000  # of one owner
_MAX_ID = 1 << 63  # what SQLite can look up
MAX_COMPARED = 500  # facts of one subject that a new one may supersede

KEY = "(SELECT key FROM owner WHERE tenant = ? AND user = ?)"
_INSERT = f"INSERT INTO fact (owner, revision, subject, verb, kind, {COLUMNS}) VALUES ({', '.join('?' * 17)})"


class Version(NamedTuple):
    """What changes with an owner's facts; `epoch` with those that are removed."""

    key: int
    epoch: int
    revision: int
    recalls: int


class Topic(NamedTuple):
    """By what facts are compared; empty where that cannot be told."""

    subject: str = ""
    verb: str = ""
    kind: str = ""


class FactStore(Database):
    """The facts of many owners in one file."""

    # Reading

    def version(self, owner: Owner) -> Version | None:
        """None for an owner without facts."""
        sql = "SELECT key, epoch, revision, recalls FROM owner WHERE tenant = ? AND user = ?"
        return next((Version(*row) for row in self.rows(sql, owner)), None)

    def changed(self, owner: Owner, key: int, after: int) -> list[Fact]:
        """Facts that changed after a revision, by id."""
        sql = f"SELECT {COLUMNS} FROM fact WHERE owner = ? AND revision > ? ORDER BY id"
        return [fact_of(owner, row, self.path) for row in self.rows(sql, (key, after))]

    def last_time(self, owner: Owner) -> float | None:
        """When the fact that was written last became valid."""
        sql = f"SELECT valid_from FROM fact WHERE owner = {KEY} ORDER BY id DESC LIMIT 1"
        return next((at for (at,) in self.rows(sql, owner) if isinstance(at, float)), None)

    def same_text(self, owner: Owner, topic: Topic, text: str) -> list[Fact]:
        """Facts that say just that, also those that were superseded."""
        return self._select(owner, "subject = ? AND text = ?", topic.subject, text)

    def same_topic(self, owner: Owner, topic: Topic) -> list[Fact]:
        """The newest facts of one subject whose verbs or kinds of values can be compared, by id."""
        where = f"""subject = ? AND (verb IN (?, ?) OR ? = ? OR (kind = ? AND kind = 'day'))
            ORDER BY +id DESC LIMIT {MAX_COMPARED}"""
        return self._select(owner, where, topic.subject, topic.verb, CHANGE, topic.verb, CHANGE, topic.kind)

    def _select(self, owner: Owner, where: str, *values: object) -> list[Fact]:
        sql = f"""SELECT {COLUMNS} FROM fact
            WHERE owner = {KEY} AND {where}"""
        return [fact_of(owner, row, self.path) for row in sorted(self.rows(sql, (*owner, *values)))]

    def owners(self, tenant: str) -> list[tuple[str, int]]:
        """Users of a tenant and how many facts each has."""
        sql = """SELECT user, count(fact.id) FROM owner LEFT JOIN fact ON fact.owner = owner.key
            WHERE tenant = ? GROUP BY owner.key ORDER BY user"""
        return [(user, count) for user, count in self.rows(sql, (tenant,))]

    # Writing

    def insert(self, owner: Owner, topic: Topic, fact: Fact) -> Fact:
        """The fact with its id; the owner is made where there is none."""
        with self.writing():
            key, number, revision = self._next(owner)
            self._check_room(owner, key, number)
            values = (fact.text, fact.source, fact.start, fact.end, fact.valid_from, fact.valid_to)
            more = (fact.importance, fact.uses, fact.supersedes, fact.embedder, fact.embedding)
            self._connection.execute(_INSERT, (key, revision, *topic, number, *values, *more))
        return Fact(number, owner.user, *values, *more)

    def end(self, owner: Owner, number: int, at: float) -> None:
        """Set `valid_to` of a fact."""
        self._set(owner, number, "valid_to", at)

    def link(self, owner: Owner, number: int, superseded: int) -> None:
        """Set `supersedes` of a fact."""
        self._set(owner, number, "supersedes", superseded)

    def _set(self, owner: Owner, number: int, column: str, value: float) -> None:
        with self.writing():
            key, revision = self._changed(owner)
            sql = f"UPDATE fact SET {column} = ?, revision = ? WHERE owner = ? AND id = ?"
            self._connection.execute(sql, (value, revision, key, number))

    def remove(self, owner: Owner, ids: Sequence[int] | None, remove_copies: Callable[[], None]) -> int:
        """Delete some facts, or an owner with all facts, and what the file still holds of them; returns how many.
        `remove_copies` removes what other files hold of them; if it fails, nothing is deleted."""
        with self.writing():
            remove_copies()
            self.must_scrub()
            version = self.version(owner)
            known = None if ids is None else [number for number in ids if 0 < number < _MAX_ID]
            count = 0 if version is None else self._delete(version.key, known)
        self.scrub()
        return count

    def _delete(self, key: int, ids: Sequence[int] | None) -> int:
        run = self._connection.execute
        if ids is None:
            count = run("DELETE FROM fact WHERE owner = ?", (key,)).rowcount
            run("DELETE FROM owner WHERE key = ?", (key,))
            return count
        run("UPDATE owner SET epoch = epoch + 1, banked = 0 WHERE key = ?", (key,))
        for table in ("slot", "prefix"):  # lines of them hold what goes
            run(f"DELETE FROM {table} WHERE owner = ?", (key,))
        return sum(run("DELETE FROM fact WHERE owner = ? AND id = ?", (key, number)).rowcount for number in ids)

    def _check_room(self, owner: Owner, key: int, number: int) -> None:
        if number > MAX_FACTS:
            (count,) = self._connection.execute("SELECT count(*) FROM fact WHERE owner = ?", (key,)).fetchone()
            if count >= MAX_FACTS:
                raise InputError(f"{owner.user} has {count:,} facts, the most there may be; forget some first")

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
            if self.version(owner) is None:
                return  # forgotten meanwhile
            key, revision = self._changed(owner)
            run = self._connection.execute
            run("UPDATE owner SET recalls = recalls + 1 WHERE key = ?", (key,))
            for number in ids:
                sql = "UPDATE fact SET uses = uses + 1, revision = ? WHERE owner = ? AND id = ?"
                run(sql, (revision, key, number))
