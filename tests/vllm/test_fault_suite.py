"""The suite of faults through the connector in vLLM."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.store.fault_suite import NAMES, Answer, Story
from tests.vllm.engine import Engine, save_tiny, transfer

NUM_CHUNKS = 3
LENGTH = NUM_CHUNKS * 128 + 20


class ConnectorDriver:
    def __init__(self, folder: Path) -> None:
        self._folder, self._model = folder, save_tiny(folder / "model")

    def start(self, secret: bytes) -> None:
        (self._folder / "secret").write_bytes(secret)
        config = transfer(self._folder / "store", secret_file=str(self._folder / "secret"))
        self._running = ExitStack()
        self._engine = self._running.enter_context(Engine(self._model, transfer=config, enable_prefix_caching=False))

    def ask(self, number: int) -> Answer:
        before = self._num_loaded()
        found = self._engine.ask(random.Random(number).choices(range(49152), k=LENGTH))
        self._engine.flush()
        return Answer(found["ids"], self._num_loaded() - before)

    def _num_loaded(self) -> int:
        """vLLM's own count of cached tokens has those, too, whose load failed."""
        return int(self._engine.metrics().get("loaded_tokens", 0))

    def settle(self, num_files: int) -> None:
        pass

    def stop(self) -> None:
        self._running.close()

    @property
    def folders(self) -> Sequence[Path]:
        return [self._folder / "store"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(ConnectorDriver(tmp_path_factory.mktemp("faults")), num_files=NUM_CHUNKS, num_chunks=NUM_CHUNKS)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_a_miss(story: Story, name: str) -> None:
    story.check(name)
