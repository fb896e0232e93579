"""The suite of faults on a store that is called directly, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.store.fault_process import NUM_CHUNKS, StoreProcess
from tests.store.fault_suite import NAMES, Answer, Story, place_and_redis
from tests.store.fault_table import Place


class StoreDriver:
    remembers = False

    def __init__(self, place: Place) -> None:
        self._place = place

    def start(self, secret: bytes, redis: str | None = None) -> None:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **self._place.environment}
        num = 1 if redis is None else 2
        self._stores = [StoreProcess(self._place.disk, secret, redis, variables) for _ in range(num)]

    def ask(self, number: int) -> Answer:
        return self._ask(self._stores[0], number)

    def _ask(self, store: StoreProcess, number: int) -> Answer:
        return Answer(*store.tell(number))

    def ask_twice(self, number: int) -> list[Answer]:
        with ThreadPoolExecutor() as threads:
            return list(threads.map(self._ask, self._stores, [number] * 2))

    def num_failed(self) -> int:
        found = [store.tell(None) for store in self._stores]
        return sum(number for counts in found for name, number in counts.items() if name.startswith("failed."))

    def stop(self) -> None:
        for store in self._stores:
            store.stop()

    @property
    def pids(self) -> Sequence[int]:
        return [store.process.pid for store in self._stores]

    @property
    def folders(self) -> Sequence[Path]:
        return [self._place.disk]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with place_and_redis(tmp_path_factory.mktemp("store")) as (place, redis):
        yield Story(StoreDriver(place), place, redis, num_files=NUM_CHUNKS, num_chunks=NUM_CHUNKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_a_miss(story: Story, name: str) -> None:
    story.check(name)
