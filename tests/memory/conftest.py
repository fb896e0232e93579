"""Memories in a folder of their own, with the embedder that needs no download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfold.memory import Memory

MakeMemory = Callable[..., Memory]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.db"


@pytest.fixture
def make(path: Path) -> Iterator[MakeMemory]:
    """A memory of a user, anna unless named; closed at the end."""
    made: list[Memory] = []

    def build(user: str = "anna", tenant: str = "") -> Memory:
        made.append(Memory(path, user, tenant=tenant, embedder="hashed"))
        return made[-1]

    yield build
    for memory in made:
        memory.close()
