"""What one user said, across conversations: `add` turns, `recall` facts, `render` them for a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import RLock
from typing import TypeVar

from kvfold.errors import InputError
from kvfold.memory.dates import checked_time
from kvfold.memory.embedding import fact_embedder, identity
from kvfold.memory.extract import clean, fact_spans, question_in
from kvfold.memory.fact import MAX_IMPORTANCE, MAX_NAME, Fact, Owner, is_name
from kvfold.memory.index import FactIndex
from kvfold.memory.jsonl import from_lines, to_lines
from kvfold.memory.prefix_files import remove_prefixes
from kvfold.memory.question import asked_for
from kvfold.memory.recall import NUM_RECALLED, Recalled, recall
from kvfold.memory.render import render
from kvfold.memory.schema import make_folder
from kvfold.memory.store import FactStore
from kvfold.memory.write import Written, copy_facts, write_fact
from kvfold.models.pull.pull import home_folder
from kvfold.shortening.base import Embedder

MAX_TURN = 1 << 20  # characters of a turn
_MAX_STEP = 60.0  # seconds
_KINDS: dict[type, str] = {str: "a text", int: "a whole number"}
_Value = TypeVar("_Value", str, int)
MAX_QUESTION = 20_000  # characters of a question; of a longer one its end is looked up


def default_path() -> Path:
    """memory/memory.db under KVFOLD_HOME."""
    return home_folder() / "memory" / "memory.db"


def file_of(path: str | Path | None) -> Path:
    """The file that is named, whose folder must be there, or the default one, whose folder is made."""
    if path is None:
        make_folder(default_path().parent)
    return Path(path or default_path()).expanduser()


class Memory:
    """The facts of one user in an SQLite file, which may hold those of many."""

    def __init__(
        self,
        path: str | Path | None,
        user: str,
        *,
        tenant: str = "",
        embedder: str | Embedder = "auto",
        store: FactStore | None = None,
    ) -> None:
        """`path` None is the default file. `store` is an open one of that file, shared with other users."""
        self.owner = Owner(_name(tenant, "tenant", may_be_empty=True), _name(user, "user"))
        self.embedder = fact_embedder(embedder) if isinstance(embedder, str) else embedder
        self._is_mine = store is None
        self.store = store or FactStore(file_of(path))
        self._index = FactIndex(self.store, self.owner, self.embedder)
        self._lock = RLock()

    def close(self) -> None:
        if self._is_mine:
            self.store.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self, text: str, *, source: str = "", at: float | None = None, importance: float = 1.0) -> list[Fact]:
        """Write the facts of a turn, word for word; returns those that are new.

        `at` is when the turn was said, now unless given; `source` names it.
        """
        return [written.fact for written in self.write(text, source=source, at=at, importance=importance)]

    def write(self, text: str, *, source: str = "", at: float | None = None, importance: float = 1.0) -> list[Written]:
        """The same as `add`; returns also what each new fact ended."""
        at = checked_time(self._now() if at is None else at)
        text, source = clean(_turn(text)), _name(source, "source", may_be_empty=True)
        if not isinstance(importance, int | float) or not 0 < importance <= MAX_IMPORTANCE:
            raise InputError(f"importance is {importance}; write a number above 0, at most {MAX_IMPORTANCE:g}")
        spans = fact_spans(text)
        texts = [text[span.start : span.end] for span in spans]
        made, codes = identity(self.embedder), self.embedder.codes(texts)
        facts = [
            Fact(0, self.owner.user, said, source, *span, at, None, float(importance), 0, None, made, code.tobytes())
            for span, said, code in zip(spans, texts, codes, strict=True)
        ]
        with self._lock, self.store.writing():
            return [written for fact in facts if (written := write_fact(self.store, self.owner, self.embedder, fact))]

    def _now(self) -> float:
        """The clock, or the time of the last fact where the clock was set back by up to a minute since: what is said
        later supersedes what was said before."""
        now, last = time.time(), self.store.last_time(self.owner)
        return last if last is not None and now < last <= now + _MAX_STEP else now

    def export(self) -> str:
        """All facts as JSON lines, by id."""
        return to_lines(self.facts())

    def load(self, lines: str) -> int:
        """Write the facts of an export with their dates; returns how many are new. All of them are written, or none."""
        facts = from_lines(_checked(lines, str, "text of an export"), self.owner.user)
        with self._lock, self.store.writing():
            known = {(fact.text, fact.valid_from) for fact in self.facts()}
            new = {(fact.text, fact.valid_from): fact for fact in reversed(facts)}  # of two alike the first
            missing = [fact for key, fact in reversed(new.items()) if key not in known]
            return copy_facts(self.store, self.owner, self.embedder, missing)

    def forget(self, ids: Sequence[int] | None = None) -> int:
        """Remove some facts by id, or everything of the user, from all files; returns how many facts that were.

        Stored KV prefixes of the user hold what is forgotten and go in the same transaction, so that no other process
        saves one meanwhile.
        """
        if ids is not None and (isinstance(ids, str) or not isinstance(ids, Iterable)):
            raise InputError(f"ids is {ids!r}; write a list of ids, such as [1, 2]")
        ids = None if ids is None else [_checked(number, int, "id of a fact") for number in ids]
        with self._lock:
            return self.store.remove(self.owner, ids, lambda: remove_prefixes(self.store.path, self.owner))

    def recall(
        self,
        question: str,
        *,
        at: float | None = None,
        top: int = NUM_RECALLED,
        abstain: bool = True,
        now: float | None = None,
    ) -> list[Recalled]:
        """The facts nearest to a question, best first; none if none is near, unless `abstain` is False.

        They were valid at `at`; without it on the day that a question about the past names, or since then, else now,
        which is `now` or the clock's. Their `uses` grow.
        """
        asked = asked_for(question_in(clean(_checked(question, str, "question")[-MAX_QUESTION:])))
        if _checked(top, int, "top") < 1:
            raise InputError(f"top is {top}; write a whole number from 1 on")
        since = asked.since if at is None else None
        now = self._now() if now is None else now
        at = checked_time((now if asked.day is None else asked.day) if at is None else at)
        with self._lock:
            self._index.refresh()
            found = recall(self._index, asked, at, top, since=since, abstain=abstain)
        if found:
            self.store.count_recall(self.owner, [one.fact.id for one in found])
        return found

    def render(self, question: str, *, at: float | None = None, top: int = NUM_RECALLED) -> str:
        """The recalled facts as one section of a prompt, by id; an empty text if none is near."""
        return render(one.fact for one in self.recall(question, at=at, top=top))

    @property
    def num_recalls(self) -> int:
        """Questions that recalled facts, as of the last look at the file."""
        return self._index.recalls

    def facts(self, *, at: float | None = None) -> Sequence[Fact]:
        """All facts by id, also those that were superseded; with `at` those that were valid then."""
        at = None if at is None else checked_time(at)
        with self._lock:
            self._index.refresh()
            return [fact for fact in self._index.facts if at is None or fact.is_valid(at)]


def _name(text: str, what: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(text, str) or not (is_name(text) or (may_be_empty and not text)):
        raise InputError(f"the {what} is {str(text)[:40]!r}; write a name of 1 to {MAX_NAME} characters")
    return text


def _checked(value: _Value, kind: type[_Value], what: str) -> _Value:
    """The value; callers need not have type checks of their own."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"the {what} is {str(value)[:40]!r} ({type(value).__name__}); give {_KINDS[kind]}")
    return value


def _turn(text: str) -> str:
    if len(_checked(text, str, "turn")) > MAX_TURN:
        raise InputError(f"the turn has {len(text):,} characters; add at most {MAX_TURN:,} at once")
    return text
