"""The suite of faults through the connector in vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.store.fault_suite import NAMES, Answer, Story, place_and_redis
from tests.store.fault_table import Place
from tests.vllm.engine import Engine, save_tiny, transfer

NUM_CHUNKS = 3
LENGTH = NUM_CHUNKS * 128 + 20


class ConnectorDriver:
    remembers = False

    def __init__(self, place: Place) -> None:
        self._place, self._model = place, save_tiny(place.folder / "model")

    def start(self, secret: bytes, redis: str | None = None) -> None:
        (self._place.folder / "secret").write_bytes(secret)
        more = {} if redis is None else {"redis": redis}
        self._config = transfer(self._place.disk, secret_file=str(self._place.folder / "secret"), **more)
        self._running = ExitStack()
        self._engines = [self._new()]

    def _new(self) -> Engine:
        options = {"enable_prefix_caching": False, "variables": self._place.environment}
        return self._running.enter_context(Engine(self._model, transfer=self._config, **options))

    def ask(self, number: int) -> Answer:
        return self._ask(self._engines[0], number)

    def _ask(self, engine: Engine, number: int) -> Answer:
        before = engine.metrics().get("loaded_tokens", 0)
        found = engine.ask(random.Random(number).choices(range(49152), k=LENGTH))
        engine.flush()
        # vLLM's own count of cached tokens has those, too, whose load failed
        return Answer(found["ids"], int(engine.metrics().get("loaded_tokens", 0) - before))

    def ask_twice(self, number: int) -> list[Answer]:
        self._engines.append(self._new())
        with ThreadPoolExecutor() as threads:
            return list(threads.map(self._ask, self._engines, [number] * 2))

    def num_failed(self) -> int:
        """Counters of a write reach vLLM with the step after it."""
        for engine in self._engines:
            engine.ask([1], max_tokens=1)
        return int(sum(engine.metrics().get("failed_stores", 0) for engine in self._engines))

    def stop(self) -> None:
        self._running.close()

    @property
    def pids(self) -> Sequence[int]:
        return [engine.pid for engine in self._engines]

    @property
    def folders(self) -> Sequence[Path]:
        return [self._place.disk]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with place_and_redis(tmp_path_factory.mktemp("connector")) as (place, redis):
        yield Story(ConnectorDriver(place), place, redis, num_files=NUM_CHUNKS, num_chunks=NUM_CHUNKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_a_miss(story: Story, name: str) -> None:
    story.check(name)
