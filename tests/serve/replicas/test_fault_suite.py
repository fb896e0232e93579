"""The suite of faults through `kvfold serve --replicas 2`: over HTTP, the proxy and the disk of each replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.serve.asking import until
from tests.serve.replicas.command import serving, tiny_folder
from tests.store.common import entry_files
from tests.store.fault_suite import NAMES, Answer, Story

NUM_FILES = 4  # of a prompt: two chunks of 256 tokens, the rest up to the marker, and the marker


class ProxyDriver:
    def __init__(self, folder: Path) -> None:
        self._folder, self._model = folder, tiny_folder(folder)

    def start(self, secret: bytes) -> None:
        (self._folder / "secret").write_bytes(secret)
        options = ["--replicas", "2", "--disk", str(self._folder / "disk"), "--disk-size", "256MB"]
        options += ["--store-secret", str(self._folder / "secret")]
        self._running = ExitStack()
        self._server = self._running.enter_context(serving(self._model, *options, log=self._folder / "log"))

    def ask(self, number: int) -> Answer:
        text = f"{number} of them: " + "the cat sat on the mat and looked at the other cat. " * 12
        reply, where = self._server.ask(text)
        assert (reply.usage.cache_read_input_tokens or reply.usage.cache_creation_input_tokens) > 512
        return Answer((reply.content[0].to_dict(), where), reply.usage.cache_read_input_tokens)

    def settle(self, num_files: int) -> None:
        until(lambda: sum(len(entry_files(folder)) for folder in self.folders) == num_files)

    def stop(self) -> None:
        self._running.close()

    @property
    def folders(self) -> Sequence[Path]:
        return [self._folder / "disk" / f"replica-{number}" for number in range(2)]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(ProxyDriver(tmp_path_factory.mktemp("proxy")), num_files=NUM_FILES, num_chunks=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_a_miss(story: Story, name: str) -> None:
    story.check(name)


def test_both_replicas_had_faults(story: Story) -> None:
    assert {answer.words[1] for answer in story.cold} == {0, 1}
