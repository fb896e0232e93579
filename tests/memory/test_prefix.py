"""The stored KV prefix of a user: read once, used while little changes, private, and gone with what is forgotten."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfold.memory import Memory
from kvfold.memory.prefix import StoredPrefix
from kvfold.memory.prefix_files import prefix_folder
from kvfold.memory.slots import render_bank
from kvfold.models.loader import Model
from kvfold.session import Session
from tests.memory.conftest import MakeMemory

TEXT = " ".join(
    f"The {colour} box holds {number} nails." for number, colour in enumerate(["red", "blue", "green", "grey"])
)


@pytest.fixture
def stored(make: MakeMemory, model: Model) -> Iterator[tuple[Memory, StoredPrefix]]:
    memory = make()
    memory.add(TEXT)
    yield memory, StoredPrefix(memory, model, num_slots=10, top=4)


def files(path: Path) -> list[Path]:
    return sorted(prefix_folder(path).glob("*"))


def tokens(prefix: StoredPrefix) -> tuple[list[int], list[str]]:
    session, changed = prefix.session()
    with session:
        return list(session.token_ids), changed


def test_it_is_read_once_and_says_the_same(stored: tuple[Memory, StoredPrefix], path: Path, model: Model) -> None:
    prefix = stored[1]
    first = prefix.ask("How many nails?", max_new_tokens=8)
    assert not prefix.is_loaded and len(files(path)) == 1
    again = prefix.ask("How many nails?", max_new_tokens=8)
    assert prefix.is_loaded and again.token_ids == first.token_ids
    with Session(model) as plain:
        plain.extend(render_bank(prefix._bank.refresh()))
        assert plain.ask("How many nails?", max_new_tokens=8).token_ids == first.token_ids


def test_it_is_private(stored: tuple[Memory, StoredPrefix], path: Path) -> None:
    tokens(stored[1])
    (file,) = files(path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert "anna" not in file.name


def test_little_changes_are_read_behind_it_and_many_make_it_anew(stored: tuple[Memory, StoredPrefix]) -> None:
    memory, prefix = stored
    first, _ = tokens(prefix)
    memory.add("The red box is now empty and open.")
    same, changed = tokens(prefix)
    assert prefix.is_loaded and same == first and len(changed) == 1 and "now empty" in changed[0]
    memory.add("The lid is lost. The key is bent.")
    other, changed = tokens(prefix)
    assert not prefix.is_loaded and other != first and changed == []
    assert tokens(prefix) == (other, []) and prefix.is_loaded


def test_a_damaged_file_is_made_anew(stored: tuple[Memory, StoredPrefix], path: Path) -> None:
    first = tokens(stored[1])
    (file,) = files(path)
    file.write_bytes(file.read_bytes()[:-100])
    assert tokens(stored[1]) == first and not stored[1].is_loaded
    assert tokens(stored[1]) == first and stored[1].is_loaded


@pytest.mark.parametrize("ids", [None, [1]])
def test_forgetting_removes_it(
    stored: tuple[Memory, StoredPrefix], path: Path, ids: list[int] | None, make: MakeMemory, model: Model
) -> None:
    memory, prefix = stored
    tokens(prefix)
    other = make("ben")
    other.add(TEXT)
    others = StoredPrefix(other, model, num_slots=10)
    tokens(others)
    memory.forget(ids)
    assert files(path) == [others.path]
    left, _ = tokens(prefix)
    assert not prefix.is_loaded and (left == []) is (ids is None)


def test_what_is_forgotten_while_it_is_read_is_not_saved(
    stored: tuple[Memory, StoredPrefix], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, prefix = stored
    extend = Session.extend

    def forgetting(session: Session, text: str) -> Session:
        monkeypatch.setattr(Session, "extend", extend)
        memory.forget()
        return session.extend(text)

    monkeypatch.setattr(Session, "extend", forgetting)
    assert tokens(prefix) == ([], []) and files(path) == []


def test_users_and_policies_have_files_of_their_own(make: MakeMemory, model: Model, path: Path) -> None:
    for user in ("anna", "ben"):
        memory = make(user)
        memory.add(TEXT)
        for policy in ("full", "int8"):
            tokens(StoredPrefix(memory, model, policy))
    assert len(files(path)) == 4
