"""The suite of faults on a store that is called directly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvfold.models.loader import Model
from kvfold.store import DiskTier, PrefixStore, Quarantine
from kvfold.testing.prefix_reuse import prefill_reusing
from tests.store.common import CHUNK, make_prefixes, make_runner
from tests.store.fault_suite import NAMES, Answer, Story
from tests.tiny import prompt, ready


class StoreDriver:
    def __init__(self, model: Model, folder: Path) -> None:
        self._model, self._folder = model, folder

    def start(self, secret: bytes) -> None:
        tier, quarantine = DiskTier(self._folder, 1 << 26), Quarantine(self._folder / "quarantine")
        self._store = PrefixStore([tier], chunk_len=CHUNK, quarantine=quarantine, secret=secret)
        self._prefixes = make_prefixes(self._store, self._model)

    def ask(self, number: int) -> Answer:
        found = prefill_reusing(make_runner(self._model), self._prefixes, prompt(3 * CHUNK + 1, seed=number))
        found.sequence.release()
        assert self._store.flush()
        return Answer(found.logits_V.tolist(), found.matched_tokens)

    def settle(self, num_files: int) -> None:
        pass

    def stop(self) -> None:
        self._store.close()

    @property
    def folders(self) -> Sequence[Path]:
        return [self._folder]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(StoreDriver(ready(), tmp_path_factory.mktemp("faults")), num_files=3, num_chunks=3)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_a_miss(story: Story, name: str) -> None:
    story.check(name)
