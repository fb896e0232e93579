"""Faults of stored entries, and what has to come of each: the same words, a miss, and the entry stored again.

The same faults are done to a store that is called directly (tests/store/test_fault_suite.py), to `kvfold serve
--replicas 2` over HTTP (tests/serve/replicas/test_fault_suite.py), and to the connector in vLLM
(tests/vllm/test_fault_suite.py). Each fault has a prompt of its own, so that a driver starts three times for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvfold.atomic_io import TEMPORARY
from kvfold.store.tiers.disk import key_of
from tests.store.common import entry_files, overwrite

CONTROL = "nothing"
SECRETS = (b"the secret of these tests", b"the secret of somebody else")


class Answer(NamedTuple):
    """Words, or whatever tells one reply from another, and how many tokens came from the store."""

    words: Any
    num_cached: int


class Driver(Protocol):
    """Something that answers prompts by name, from 0 up, through a store on disk; `start` finds only files."""

    def start(self, secret: bytes) -> None: ...
    def ask(self, number: int) -> Answer: ...
    def settle(self, num_files: int) -> None:
        """Wait until so many files are written; fewer where it can tell by itself."""

    def stop(self) -> None: ...
    @property
    def folders(self) -> Sequence[Path]: ...


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    overwrite(path, bytes(data))


def _swap(first: Path, second: Path) -> None:
    a, b = first.read_bytes(), second.read_bytes()
    overwrite(first, b)
    overwrite(second, a)


def _half_written(path: Path) -> None:
    """As a writer that was killed leaves it."""
    path.with_suffix(TEMPORARY).write_bytes(path.read_bytes()[:100])
    path.unlink()


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


Chunks = Sequence[Path]  # files of the whole chunks of a prompt, in order
FAULTS: dict[str, Callable[[Chunks, Chunks], object]] = {  # what happens to a prompt's chunks; those of another prompt
    "a flipped bit in the first block": lambda own, other: _flip(own[0], -100),
    "a flipped bit in the last block": lambda own, other: _flip(own[-1], -1),
    "a flipped bit in the header": lambda own, other: _flip(own[0], 60),
    "a flipped bit in the preamble": lambda own, other: _flip(own[0], 9),
    "cut in half": lambda own, other: overwrite(own[0], own[0].read_bytes()[: own[0].stat().st_size // 2]),
    "empty": lambda own, other: overwrite(own[0], b""),
    "more behind the end": lambda own, other: overwrite(own[0], own[0].read_bytes() + b"more"),
    "two entries swapped": lambda own, other: _swap(own[0], own[1]),
    "the entry of another prompt": lambda own, other: overwrite(own[0], other[0].read_bytes()),
    "missing": lambda own, other: own[0].unlink(),
    "half written": lambda own, other: _half_written(own[0]),
    "past its time": lambda own, other: os.utime(own[0], (time.time() - 5, time.time() - 5)),
    "a folder in its place": lambda own, other: _folder_instead(own[0]),
}
NAMES = [CONTROL, *FAULTS]
NOT_REPAIRED = ("a folder in its place",)


class Story:
    """All faults, through one driver."""

    def __init__(self, driver: Driver, *, num_files: int, num_chunks: int) -> None:
        """A prompt is stored in `num_files` files, of which `num_chunks` are whole chunks."""
        driver.start(SECRETS[0])
        self.cold, self._chunks = list[Answer](), list[Chunks]()
        known = set[Path]()
        for number in range(len(NAMES)):
            self.cold.append(driver.ask(number))
            driver.settle(num_files * (number + 1))
            found = _files(driver) - known
            known |= found
            self._chunks.append(sorted(found, key=_order)[:num_chunks])
        driver.stop()
        self._good = [_state(chunks) for chunks in self._chunks]
        for chunks, fault in zip(self._chunks[1:], FAULTS.values(), strict=True):
            fault(chunks, self._chunks[0])
        self._damaged = [_state(chunks) for chunks in self._chunks]
        driver.start(SECRETS[0])
        self.warm = [driver.ask(number) for number in range(len(NAMES))]
        self.again = [driver.ask(number) for number in range(len(NAMES))]
        driver.stop()
        self._repaired = [_state(chunks) for chunks in self._chunks]
        driver.start(SECRETS[1])
        self.other_secret = driver.ask(0)
        driver.stop()

    def check(self, name: str) -> None:
        number = NAMES.index(name)
        assert self.cold[number].num_cached == 0 < self.warm[0].num_cached
        assert self.warm[number].words == self.again[number].words == self.cold[number].words
        if name == CONTROL:
            assert self.other_secret == self.cold[0], "an entry that another secret signed is a miss"
            return
        assert self.warm[number].num_cached < self.warm[0].num_cached
        if name not in NOT_REPAIRED:
            self._check_repaired(number)

    def _check_repaired(self, number: int) -> None:
        """The first chunk with damage; those behind it may wait until they are read."""
        states = zip(self._good[number], self._damaged[number], self._repaired[number], strict=True)
        good, damaged, repaired = next(state for state in states if state[0] != state[1])
        assert good is not None and repaired is not None
        assert len(repaired[0]) == len(good[0]) and repaired != damaged


def _files(driver: Driver) -> set[Path]:
    return {path for folder in driver.folders for path in entry_files(folder)}


def _order(path: Path) -> tuple[bool, int]:
    """Tensors before markers, which are small, and in the order of the prompt."""
    key = key_of(path)
    assert key is not None
    return path.stat().st_size < 4096, key.start


def _state(chunks: Chunks) -> list[tuple[bytes, bool] | None]:
    """Content, and whether it is alive."""
    return [(path.read_bytes(), path.stat().st_mtime > time.time()) if path.is_file() else None for path in chunks]
