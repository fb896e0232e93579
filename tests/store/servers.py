"""A Redis server as a process: started, stopped, killed and started again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class RedisServer:
    """Keeps nothing on disk; `url` is that of a socket in a folder of its own, whose path is short, as sockets need."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="redis")
        self._socket = Path(self._folder.name) / "s"
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def found(cls) -> RedisServer | None:
        """None where redis-server or redis-py is not installed."""
        return cls() if shutil.which("redis-server") and find_spec("redis") else None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self, *options: str) -> None:
        place = ("--port", "0", "--unixsocket", str(self._socket), "--dir", self._folder.name)
        settings = ("--save", "", "--appendonly", "no", *options)
        self._process = subprocess.Popen(["redis-server", *place, *settings], stdout=subprocess.DEVNULL)
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

    def ask(self, *words: str | bytes) -> Any:
        """What the server answers to a command of its owner."""
        import redis

        with redis.Redis.from_url(self.url) as client:
            return client.execute_command(*words)

    def refuse(self, how: str) -> str:
        """From now on it reads and changes nothing; the address under which it does so."""
        if how == "replica":
            self.ask("REPLICAOF", "127.0.0.1", "1")  # of nobody: it goes on with what it has
        elif how == "acl":
            allowed = ("+getrange", "+strlen", "+pttl", "+scan", "+ping")
            self.ask("ACL", "SETUSER", "reader", "on", ">word", "~*", *allowed)
            return f"unix://reader:word@{self._socket}"
        else:
            self._fail_to_save()
        return self.url

    def _fail_to_save(self) -> None:
        """Its snapshot cannot be written, for a folder has its name: from then on it refuses writes (MISCONF)."""
        (Path(self._folder.name) / "dump.rdb" / "taken").mkdir(parents=True)
        self.ask("CONFIG", "SET", "save", "3600 1")
        self.ask("BGSAVE")
        for _ in range(500):
            if self.ask("INFO", "persistence")["rdb_last_bgsave_status"] == "err":
                return
            time.sleep(0.02)
        raise RuntimeError("the snapshot was written")

    def flip(self, position: int) -> int:
        """A bit of a byte of every entry; returns how many there are."""
        names = self.ask("KEYS", "kvfold:*")
        for name in names:
            length = self.ask("STRLEN", name)
            at = str(position % length)
            (byte,) = self.ask("GETRANGE", name, at, at)
            self.ask("SETRANGE", name, at, bytes([byte ^ 1]))
        return len(names)

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
