"""The suite of faults through `kvfold serve --replicas 2`: over HTTP, the proxy, each replica's disk, and Redis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.serve.replicas.command import serving, tiny_folder
from tests.store.fault_suite import NAMES, Answer, Story, place_and_redis
from tests.store.fault_table import Place

NUM_FILES = 4  # of a prompt: two chunks of 256 tokens, the rest up to the marker, and the marker
MODELS = ["tiny", "name-1"]  # names of one model; a prompt's replica follows from them, too


class ProxyDriver:
    remembers = True

    def __init__(self, place: Place) -> None:
        self._place, self._model = place, tiny_folder(place.folder)
        self.asked = set[int]()

    def start(self, secret: bytes, redis: str | None = None) -> None:
        folder = self._place.folder
        (folder / "secret").write_bytes(secret)
        options = ["--replicas", "2", "--disk", str(self._place.disk), "--disk-size", "256MB"]
        options += ["--store-secret", str(folder / "secret"), *(() if redis is None else ("--redis", redis))]
        options += ["--alias", MODELS[1]]
        self._running, environment = ExitStack(), self._place.environment
        command = serving(self._model, *options, log=folder / "log", environment=environment)
        self._server = self._running.enter_context(command)

    def ask(self, number: int) -> Answer:
        found, where = self._ask(number, MODELS[0])
        self.asked.add(where)
        return found

    def _ask(self, number: int, model: str) -> tuple[Answer, int]:
        text = f"{number} of them: " + "the cat sat on the mat and looked at the other cat. " * 12
        reply, where = self._server.ask(text, model=model)
        assert (reply.usage.cache_read_input_tokens or reply.usage.cache_creation_input_tokens) > 512
        return Answer(reply.content[0].to_dict(), reply.usage.cache_read_input_tokens), where

    def ask_twice(self, number: int) -> list[Answer]:
        with ThreadPoolExecutor() as threads:
            found = list(threads.map(self._ask, [number] * 2, MODELS))
        assert {where for _, where in found} == {0, 1}
        return [answer for answer, _ in found]

    def num_failed(self) -> int:
        with urlopen(f"{self._server.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return sum(
            int(found) for found in re.findall(r'^kvfold_store_events_total{event="failed\..*} (\d+)$', text, re.M)
        )

    def stop(self) -> None:
        self._running.close()

    @property
    def pids(self) -> Sequence[int]:
        return self._server.replicas

    @property
    def folders(self) -> Sequence[Path]:
        return [self._place.disk / f"replica-{number}" for number in range(2)]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with place_and_redis(tmp_path_factory.mktemp("proxy")) as (place, redis):
        driver = ProxyDriver(place)
        found = Story(driver, place, redis, num_files=NUM_FILES, num_chunks=2)
        assert driver.asked == {0, 1}
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_a_miss(story: Story, name: str) -> None:
    story.check(name)
