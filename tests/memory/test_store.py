"""The file: private, whole after a kill, one clear error where it is damaged, and one writer at a time."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from kvfold.errors import FileError, InputError
from kvfold.memory import Memory
from kvfold.memory.memory import MAX_TURN
from kvfold.memory.store import FactStore
from tests.memory.conftest import MakeMemory

WRITER = """
import sys
from kvfold.memory import Memory
memory = Memory(sys.argv[1], sys.argv[2], embedder="hashed")
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    memory.add(f"The {sys.argv[4]} house number {number} is old. Its garden number {number} is wide.")
"""


def writer(path: Path, user: str, count: int, word: str = "red") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), user, str(count), word]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_files_are_private(make: MakeMemory, path: Path) -> None:
    path.touch(0o644)
    memory = make()
    memory.add("Anna lives in Berlin.")
    files = list(path.parent.iterdir())
    assert len(files) >= 2 and {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_the_default_file_is_under_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path / "home"))
    with Memory(None, "anna", embedder="hashed") as memory:
        memory.add("Anna lives in Berlin.")
    assert (tmp_path / "home" / "memory" / "memory.db").is_file()


def test_a_killed_writer_leaves_a_readable_file(path: Path) -> None:
    process = writer(path, "anna", 100_000)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    with FactStore(path) as store:
        while not (found := store.owners("")) or found[0][1] < 20:
            assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    with Memory(path, "anna", embedder="hashed") as memory:
        facts = memory.facts()
        assert len(facts) >= 20 and len(facts) % 2 == 0, "a turn is written as a whole"
        assert [fact.id for fact in facts] == list(range(1, len(facts) + 1))
        assert memory.add("Anna lives in Berlin.")


def test_two_processes_write_at_once(make: MakeMemory, path: Path) -> None:
    processes = [writer(path, "anna", 30, word) for word in ("red", "blue")]
    assert [process.wait() for process in processes] == [0, 0]
    facts = make().facts()
    assert len({fact.text for fact in facts}) == 90, "gardens are the same facts for both"
    assert [fact.id for fact in facts] == list(range(1, len(facts) + 1))


def test_threads_share_one_memory(make: MakeMemory) -> None:
    memory = make()

    def work(name: int) -> None:
        for number in range(10):
            memory.add(f"The house of {name} number {number} is old.")
            memory.recall(f"Which house of {name}?")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(memory.facts()) == 40


@pytest.mark.parametrize(
    "content", [b"no database at all, but long enough to be read as one" * 40, b"SQLite format 3\0" * 64]
)
def test_a_foreign_file_is_one_clear_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(FileError, match="is damaged or no SQLite file"):
        Memory(path, "anna", embedder="hashed")
    assert path.read_bytes() == content


def test_the_database_of_another_program_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(FileError, match="of another program"):
        Memory(path, "anna", embedder="hashed")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (before, 0o644)


def test_a_file_that_is_no_memory_keeps_its_mode(path: Path) -> None:
    path.write_text("a list of things to buy\n" * 100, encoding="utf-8")
    path.chmod(0o644)
    with pytest.raises(FileError, match="no SQLite file"):
        Memory(path, "anna", embedder="hashed")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_pipe_is_refused_and_keeps_its_mode(path: Path) -> None:
    os.mkfifo(path)
    path.chmod(0o644)
    with pytest.raises(FileError, match="is a device or a pipe; name a file"):
        Memory(path, "anna", embedder="hashed")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_memory_that_others_could_read_is_private_again(make: MakeMemory, path: Path) -> None:
    make().add("Anna lives in Berlin.")
    path.chmod(0o644)
    make("ben")
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


@pytest.mark.parametrize("seed", range(24))
def test_whatever_bytes_are_damaged_errors_are_sentences(tmp_path: Path, seed: int) -> None:
    random, path = Random(seed), tmp_path / "memory.db"
    with Memory(path, "anna", embedder="hashed") as memory:
        memory.add("\n".join(f"My box {n} is in room {n * 7}." for n in range(60)))
    content = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 20, 400))):
        content[random.randrange(len(content))] = random.randrange(256)
    path.write_bytes(content[: random.choice((len(content), len(content) // 2))])
    with suppress(FileError, InputError), Memory(path, "anna", embedder="hashed") as memory:
        for work in (memory.facts, lambda: memory.recall("Where is my box 7?"), lambda: memory.add("I live in Rome.")):
            with suppress(FileError, InputError):
                work()
        memory.forget()


def test_a_newer_version_is_refused(make: MakeMemory, path: Path) -> None:
    make().store._connection.execute("PRAGMA user_version = 9")
    with pytest.raises(FileError, match="has version 9 of a memory and this kvfold reads 1"):
        Memory(path, "anna", embedder="hashed")


@pytest.mark.parametrize("num_pages", [1, 20])
def test_damaged_pages_are_told_at_opening(path: Path, num_pages: int) -> None:
    """Also to who asks for nothing on them, and before anything is written."""
    with Memory(path, "anna", embedder="hashed") as memory:
        memory.add(" ".join(f"The house number {number} is old and red." for number in range(500)))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096 * num_pages] = b"\xa5" * 4096 * num_pages
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"^the memory [^\n]* is damaged or no SQLite file \([^\n]+\); restore a copy"):
        Memory(path, "ben", embedder="hashed")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    ["text = x'00ff'", "text = hex(zeroblob(4000))", "valid_from = 1e300", "valid_to = 'soon'", "importance = 9e99"],
)
def test_a_row_that_was_changed_by_hand_is_damage(make: MakeMemory, change: str) -> None:
    memory = make()
    memory.add("Anna lives in Berlin.")
    memory.store._connection.execute(f"UPDATE fact SET {change}")
    with pytest.raises(FileError, match=r"is damaged \(fact 1\)"):
        memory.facts()


def test_a_full_memory_says_so(make: MakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.memory.store.MAX_FACTS", 3)
    memory = make()
    memory.add("One is red. Two is red. Three is red.")
    with pytest.raises(InputError, match="anna has 3 facts, the most there may be; forget some first"):
        memory.add("Four is red. Five is red.")
    assert len(memory.facts()) == 3
    memory.forget([1])
    memory.add("Six is red.")


def test_a_turn_has_a_limit(make: MakeMemory) -> None:
    with pytest.raises(InputError, match="add at most 1,048,576 at once"):
        make().add("a" * (MAX_TURN + 1))
