"""A Redis server of its own for whoever asks, on a socket; skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.store.servers import RedisServer


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    pytest.importorskip("redis", reason="redis-py is not installed")
    server = RedisServer()
    server.start()
    yield server
    server.kill()
