"""A Redis server of its own for whoever asks, on a socket; skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.servers import RedisServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    pytest.importorskip("redis", reason="redis-py is not installed")
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()
