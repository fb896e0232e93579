"""A Redis server as a process: started, stopped, killed and started again."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from pathlib import Path


class RedisServer:
    """Keeps nothing on disk; `url` is that of a socket in a folder of its own, whose path is short, as sockets need."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="redis")
        self._socket = Path(self._folder.name) / "s"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self, *options: str) -> None:
        settings = ("--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no", *options)
        self._process = subprocess.Popen(["redis-server", *settings], stdout=subprocess.DEVNULL)
        for _ in range(500):
            if self._answers():
                return
            time.sleep(0.02)
        raise RuntimeError("redis-server does not answer")

    def _answers(self) -> bool:
        import redis

        try:
            return bool(redis.Redis.from_url(self.url).ping())
        except redis.RedisError:
            return False

    def pause(self) -> None:
        """It hangs: connections stay, answers do not come."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
