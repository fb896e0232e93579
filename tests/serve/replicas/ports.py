"""Ports that nobody uses."""

from __future__ import annotations

import socket


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
