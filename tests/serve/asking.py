"""Requests that several tests send to a running server, and waiting for what comes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

from kvfold.serve.auth import key_digest
from tests.serve.running import Running

SECRET = "the cat sat on the mat and ate a hat "
SYSTEM: Any = [{"type": "text", "text": SECRET * 12, "cache_control": {"type": "ephemeral"}}]
TENANTS = {key_digest("key-a"): "red", key_digest("key-b"): "blue"}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def get(server: Running, path: str, body: str | None = None, **headers: str) -> tuple[int, str, Any]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.headers
    connection.close()
    return found


def send(server: Running, key: str = "key-a", **more: Any) -> Any:
    """A long prompt with a marker, and a short reply."""
    asked: Any = {"model": "tiny", "max_tokens": 5, "system": SYSTEM, "messages": [{"role": "user", "content": "go"}]}
    return server.anthropic_as(key).messages.create(**{**asked, **more})
