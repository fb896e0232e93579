"""Faults of a store, and what has to come of each: the same words, a miss that is counted, and a process that goes on.

The same faults (tests/store/fault_table.py) are done to a store that is called directly
(tests/store/test_fault_suite.py), to `kvfold serve --replicas 2` over HTTP (tests/serve/replicas/test_fault_suite.py),
and to the connector in vLLM (tests/vllm/test_fault_suite.py). Each fault has prompts of its own, so that a driver
starts three times for all:

1. Prompts are stored; the disk is full for a while; a writer is killed.
2. Files are damaged meanwhile; every prompt is asked twice.
3. With another secret, which makes every file unreadable, and with Redis: two processes write the same entries at once;
   then Redis refuses writes, hangs and is killed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from kvfold.atomic_io import TEMPORARY
from kvfold.store.key import Key
from kvfold.store.tiers.disk import key_of
from tests.store.common import entry_files
from tests.store.fault_table import DAMAGE, DISK, FULL, NOT_REPAIRED, READ_ONLY, REDIS, Chunks, Place
from tests.store.servers import RedisServer

CONTROL, KILLED, TWO = "nothing", "a writer is killed", "two processes write the same entries"
STORED = [CONTROL, *DAMAGE]
WRITING = [*DISK, KILLED]
NAMES = [*STORED, *WRITING, *REDIS, TWO]
NUM_PROMPTS = len(STORED) + len(WRITING)  # those of Redis are prompts that were stored under the first secret
SECRETS = (b"the secret of these tests", b"the secret of somebody else")


class Answer(NamedTuple):
    """Words, or whatever tells one reply from another, and how many tokens came from the store."""

    words: Any
    num_cached: int


class Driver(Protocol):
    """Something that answers prompts by name, from 0 up, through a store in `place.disk`."""

    remembers: bool  # in memory, what it has asked the store for

    def start(self, secret: bytes, redis: str | None = None) -> None:
        """Nothing is left in memory of what was asked before."""

    def ask(self, number: int) -> Answer: ...
    def ask_twice(self, number: int) -> list[Answer]:
        """In two processes at once."""

    def num_failed(self) -> int:
        """Entries that were not stored, as metrics tell."""

    def stop(self) -> None: ...
    @property
    def pids(self) -> Sequence[int]:
        """Processes that write."""

    @property
    def folders(self) -> Sequence[Path]: ...


class Troubled(NamedTuple):
    """Answers during a fault, to a prompt that was stored before and to a new one; whether metrics tell of it."""

    known: Answer
    new: Answer
    is_counted: bool


class Story:
    """All faults, through one driver."""

    def __init__(
        self, driver: Driver, place: Place, redis: RedisServer | None, *, num_files: int, num_chunks: int
    ) -> None:
        """A prompt is stored in `num_files` files, of which `num_chunks` are whole chunks."""
        self._driver, self._place, self._redis = driver, place, redis
        self._num_files, self._num_chunks = num_files, num_chunks
        self._during: dict[str, Troubled] = {}
        self._run(SECRETS[0], self._store_all)
        self._good = [_state(chunks) for chunks in self._chunks]
        for chunks, damage in zip(self._chunks[1:], DAMAGE.values(), strict=True):
            damage(chunks, self._chunks[0])
        self._damaged = [_state(chunks) for chunks in self._chunks]
        self._run(SECRETS[0], self._ask_again)
        self._repaired = [_state(chunks) for chunks in self._chunks]
        self._run(SECRETS[1], self._ask_others, None if redis is None else redis.url)

    def _run(self, secret: bytes, what: Callable[[], None], redis: str | None = None) -> None:
        self._driver.start(secret, redis)
        try:
            what()
        finally:
            self._driver.stop()

    def _store_all(self) -> None:
        driver = self._driver
        self.cold, self._chunks = list[Answer](), list[Chunks]()
        for number in range(len(STORED)):
            before = self._files()
            self.cold.append(driver.ask(number))
            self._settle((number + 1) * self._num_files)
            self._chunks.append(sorted(self._files() - before, key=_order)[: self._num_chunks])
        for number, (name, fault) in enumerate(DISK.items(), len(STORED)):
            if name != FULL or self._place.is_mounted:
                with fault(self._place, driver.pids):
                    self._during[name] = self._ask_in_trouble(0, number)
        trigger = self._place.hooks / "kill"
        trigger.touch()
        with suppress(RuntimeError, OSError):  # a driver may be the writer itself
            driver.ask(NUM_PROMPTS - 1)
        until(lambda: not trigger.exists())
        until(lambda: self._num_halves() == 1)

    def _settle(self, num_files: int) -> None:
        """Writes are done in the background."""
        until(lambda: len(self._files()) >= num_files)

    def _num_halves(self) -> int:
        return sum(1 for folder in self._driver.folders for _ in folder.glob(f"entries/*/*/.*{TEMPORARY}"))

    def _ask_in_trouble(self, known: int, new: int) -> Troubled:
        before = self._driver.num_failed()
        answers = self._driver.ask(known), self._driver.ask(new)
        return Troubled(*answers, _in_time(lambda: self._driver.num_failed() > before))

    def _ask_again(self) -> None:
        self.warm, self.again = (list(map(self._driver.ask, range(NUM_PROMPTS))) for _ in range(2))

    def _ask_others(self) -> None:
        self.computed = {number: self._driver.ask(number) for number in (0, *range(len(STORED), NUM_PROMPTS))}
        if self._redis is None:
            return
        known, new = (range(begin, begin + len(REDIS)) for begin in (1, 1 + len(REDIS)))
        for number in known:
            self._driver.ask(number)
        until(lambda: self._num_in_redis() == self._num_files * (len(self.computed) + len(known)))
        self._ask_twice(new.stop)
        self._wipe()
        for (name, fault), *numbers in zip(REDIS.items(), known, new, strict=True):
            with fault(self._redis):
                self._during[name] = self._ask_in_trouble(*numbers)
        others = count(NUM_PROMPTS)  # Redis is empty again, and takes what nobody has asked before, sooner or later
        until(lambda: bool(self._driver.ask(next(others))) and self._num_in_redis() > 0)

    def _ask_twice(self, number: int) -> None:
        assert self._redis is not None
        place, before, num_failed = self._place.hooks / "meet", self._files(), self._driver.num_failed()
        place.mkdir()
        self._twice = self._driver.ask_twice(number)
        until(lambda: len(self._files() - before) == len(self._driver.folders) * self._num_files)
        self._on_disk = [(_key(path).text, path.read_bytes()) for path in self._files() - before]
        names = [f"kvfold:{name}" for name, _ in self._on_disk]
        until(lambda: self._redis is not None and self._redis.ask("EXISTS", *names) == len(names))
        self._in_redis = {name: self._redis.ask("GET", f"kvfold:{name}") for name, _ in self._on_disk}
        self._num_met = len(list(place.iterdir()))
        self._num_lost = self._driver.num_failed() - num_failed
        self._after = self._driver.ask(number)

    def _num_in_redis(self) -> int:
        assert self._redis is not None
        return len(self._redis.ask("KEYS", "kvfold:*"))

    def _wipe(self) -> None:
        """From now on Redis alone has what was stored."""
        for folder in self._driver.folders:
            for path in (folder / "entries").iterdir():
                shutil.rmtree(path)

    def _files(self) -> set[Path]:
        return {path for folder in self._driver.folders for path in entry_files(folder)}

    # What came of it

    def check(self, name: str) -> None:
        if name == FULL and not self._place.is_mounted:
            pytest.skip("no file system can be mounted here")
        if name in (*REDIS, TWO) and self._redis is None:
            pytest.skip("redis-server or redis-py is not installed")
        if name in STORED:
            self._check_stored(name)
        elif name in WRITING:
            self._check_writing(name)
        elif name in REDIS:
            self._check_redis(name)
        else:
            self._check_two()

    def _check_stored(self, name: str) -> None:
        number = STORED.index(name)
        assert self.cold[number].num_cached == 0 < self.warm[0].num_cached
        assert self.warm[number].words == self.again[number].words == self.cold[number].words
        if name == CONTROL:
            assert self.computed[0] == self.cold[0], "an entry that another secret signed is a miss"
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

    def _check_writing(self, name: str) -> None:
        """What was not written is computed after a restart, and stored then."""
        number = len(STORED) + WRITING.index(name)
        cold, warm, again = self.computed[number], self.warm[number], self.again[number]
        assert cold.words == warm.words == again.words
        assert cold.num_cached == warm.num_cached == 0 < again.num_cached
        if name in DISK:
            during = self._during[name]
            assert during.is_counted and during.new == cold
            assert during.known.words == self.cold[0].words and during.known.num_cached > 0

    def _check_redis(self, name: str) -> None:
        number, during = list(REDIS).index(name), self._during[name]
        assert during.is_counted
        assert during.known.words == self.cold[1 + number].words
        assert during.new == self.cold[1 + len(REDIS) + number]
        assert (during.known.num_cached > 0) == (self._driver.remembers or name == READ_ONLY)

    def _check_two(self) -> None:
        cold = self.cold[1 + 2 * len(REDIS)]
        assert [answer.words for answer in self._twice] == [cold.words] * len(self._twice)
        assert self._num_met == 2 and self._num_lost == 0
        assert len(self._in_redis) >= self._num_files
        assert all(entry in self._on_disk for entry in self._in_redis.items())
        assert self._after.words == cold.words and self._after.num_cached > 0


def until(holds: Callable[[], bool]) -> None:
    assert _in_time(holds)


def _in_time(holds: Callable[[], bool], most_s: float = 120) -> bool:
    deadline = time.monotonic() + most_s
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _key(path: Path) -> Key:
    found = key_of(path)
    assert found is not None
    return found


def _order(path: Path) -> tuple[bool, int]:
    """Tensors before markers, which are small, and in the order of the prompt."""
    return path.stat().st_size < 4096, _key(path).start


def _state(chunks: Chunks) -> list[tuple[bytes, bool] | None]:
    """Content, and whether it is alive."""
    return [(path.read_bytes(), path.stat().st_mtime > time.time()) if path.is_file() else None for path in chunks]


@contextmanager
def place_and_redis(folder: Path) -> Iterator[tuple[Place, RedisServer | None]]:
    """A place for a driver, and a Redis server where there is one."""
    place, server = Place(folder), RedisServer.found()
    try:
        if server is not None:
            server.start()
        yield place, server
    finally:
        if server is not None:
            server.kill()
        place.close()
