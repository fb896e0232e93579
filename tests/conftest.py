"""Models, built or read once for the whole run; every test must leave their arenas empty. Redis for who asks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

if not torch.cuda.is_available():  # kernels run in triton's interpreter; it is chosen before triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

from kvfold.models.loader import Model
from kvfold.policy import registry
from tests.real import load
from tests.speeds import mark_thorough
from tests.store.servers import RedisServer
from tests.tiny import ready


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_thorough(items)


def pytest_collection_finish() -> None:
    """Modules live as long as the process: no collection looks at them again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@cache
def _built(family: str) -> Model:
    return ready(family)


@pytest.fixture
def shared() -> Iterator[Callable[[str], Model]]:
    """Attached models by family. Whatever a test lent from their arenas has to be back when it ends."""
    used: list[Model] = []

    def get(family: str) -> Model:
        used.append(_built(family))
        return used[-1]

    yield get
    if any(model.arena.used_bytes for model in used):
        gc.collect()  # what is in a cycle
    assert all(model.arena.used_bytes == 0 for model in used)


@pytest.fixture
def model(shared: Callable[[str], Model]) -> Model:
    """The tiny Llama."""
    return shared("llama")


@pytest.fixture
def own_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that a test registers are forgotten when it ends."""
    registry.load_variants()
    monkeypatch.setattr(registry, "_terms", dict(registry._terms))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """A real one, in fp32: read once for all tests of a process."""
    return load("smollm2-135m", dtype="float32", device="cpu", memory="1GB")


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """One of its own, on a socket; skipped where there is none."""
    server = RedisServer.found()
    if server is None:
        pytest.skip("redis-server or redis-py is not installed")
    server.start()
    yield server
    server.kill()
