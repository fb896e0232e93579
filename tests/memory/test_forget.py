"""What is forgotten is in no file, whatever the file went through."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.errors import FileError
from kvfold.memory import Memory
from kvfold.memory.prefix_files import prefix_folder, prefix_path
from tests.memory.conftest import MakeMemory

SECRET = "Xylophone-4711"
QUESTION = f"What about {SECRET}?"


def raw(folder: Path) -> bytes:
    """The bytes of all files, names included."""
    return b"".join(str(path).encode() + path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def fill(memory: Memory) -> None:
    memory.add(f"My word is {SECRET}.", source="chat", at=1e9)
    memory.add(" ".join(f"The house number {number} is old and red." for number in range(300)))
    memory.add(f"My word is now not-{SECRET}. " * 3)


def test_a_forgotten_user_is_in_no_file(make: MakeMemory, path: Path) -> None:
    memory, other = make("anna-the-user"), make("ben")
    fill(memory)
    other.add("Ben lives in Bonn.")
    assert SECRET.encode() in raw(path.parent) and b"anna-the-user" in raw(path.parent)
    assert memory.forget() == 302
    for needle in (SECRET, SECRET.lower(), "anna-the-user", "house number"):
        assert needle.encode() not in raw(path.parent), needle
    assert memory.facts() == [] and memory.recall(QUESTION) == [] and len(other.facts()) == 1
    assert memory.forget() == 0


def test_a_forgotten_fact_is_in_no_file_and_the_others_stay(make: MakeMemory, path: Path) -> None:
    memory = make()
    fill(memory)
    ids = [fact.id for fact in memory.facts() if SECRET in fact.text]
    assert memory.forget(ids) == len(ids) == 2
    assert SECRET.encode() not in raw(path.parent) and len(memory.facts()) == 300
    assert memory.forget([10_000]) == 0
    (new,) = memory.add("Ben lives in Bonn.")
    assert new.id == 303, "an id is not given twice"


def test_another_process_that_had_read_it_forgets_it_too(make: MakeMemory) -> None:
    first, second = make(), make()
    fill(first)
    assert second.recall(QUESTION)
    first.forget()
    first.add("The weather is fine.")
    assert second.recall(QUESTION) == [] and len(second.facts()) == 1


def test_a_process_killed_while_it_forgets_leaves_it_to_the_next(make: MakeMemory, path: Path) -> None:
    """Facts are deleted, and the process dies before it rewrites the file."""
    memory = make()
    fill(memory)
    program = f"""
import os, signal
from kvfold.memory import Memory
from kvfold.memory.database import Database
Database.scrub = lambda self: os.kill(os.getpid(), signal.SIGKILL)
Memory({str(path)!r}, "anna", embedder="hashed").forget()
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    memory.close()
    make("ben")
    assert SECRET.encode() not in raw(path.parent)


def test_a_log_that_another_process_reads_is_told_and_emptied_later(
    make: MakeMemory, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfold.memory.schema.BUSY_SECONDS", 0.1)
    memory = make()
    fill(memory)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM fact").fetchone()
    with pytest.raises(FileError, match="run forget again"):
        memory.forget()
    make("ben").add("Ben lives in Bonn.")
    reader.close()
    make("kim")
    assert SECRET.encode() not in raw(path.parent)


@pytest.mark.parametrize("number", [0, -1, 77, 1 << 63, 10**30])
def test_an_id_that_no_fact_has_forgets_nothing(make: MakeMemory, number: int) -> None:
    memory = make()
    memory.add("I live in Berlin.")
    assert memory.forget([number]) == 0
    assert len(memory.facts()) == 1


def test_nothing_is_forgotten_where_stored_prefixes_cannot_be_found(make: MakeMemory, path: Path) -> None:
    memory = make()
    memory.add("I live in Berlin.")
    prefix_folder(path).write_text("no folder", encoding="utf-8")
    with pytest.raises(FileError, match=r"cannot be removed \(Not a directory\), so nothing is forgotten"):
        memory.forget()
    assert len(memory.facts()) == 1


def test_nobody_saves_a_prefix_while_prefixes_and_facts_are_removed(
    make: MakeMemory, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix is saved in a transaction, so a process killed between the two removals leaves none of what is gone."""
    memory, told = make(), list[str]()
    memory.add("I live in Berlin.")

    def another_saves(*_: object) -> None:
        other = sqlite3.connect(path, 0.0, isolation_level=None)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        told.append("locked")
        other.close()

    monkeypatch.setattr("kvfold.memory.memory.remove_prefixes", another_saves)
    assert memory.forget() == 1 and told == ["locked"]


def test_a_link_to_the_file_leads_to_the_same_prefixes(make: MakeMemory, path: Path, tmp_path: Path) -> None:
    make().add("I live in Berlin.")
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(path)
    with Memory(link, "anna", embedder="hashed") as memory:
        stored = prefix_path(memory.store.path, memory.owner, "name")
    stored.write_bytes(SECRET.encode())
    assert stored.parent == prefix_folder(path) and list(link.parent.iterdir()) == [link]
    make().forget()
    assert not stored.exists()


def test_a_prefix_that_another_process_has_just_removed_is_no_error(make: MakeMemory, path: Path) -> None:
    memory = make()
    memory.add("I live in Berlin.")
    gone = prefix_path(path, memory.owner, "name")
    gone.symlink_to(path.parent / "nothing")  # listed, and not there when it is opened
    assert memory.forget() == 1 and not gone.is_symlink()
