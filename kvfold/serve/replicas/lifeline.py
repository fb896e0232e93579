"""What a replica knows of the process that started it, and its end when that one is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

VARIABLE = "KVFOLD_REPLICA"  # JSON
_GRACE_S = 2.0  # beyond the replica's own shutdown


@dataclass(frozen=True)
class Lifeline:
    """`path`: where the replica listens; `number`: from 0 to `of` - 1."""

    path: str
    number: int
    of: int
    _parent: socket.socket

    @staticmethod
    def of_environment() -> Lifeline | None:
        """What `Fleet` tells a process that it starts; None in any other one. Processes that this one starts are not
        told."""
        plan = os.environ.pop(VARIABLE, None)
        if plan is None:
            return None
        found = json.loads(plan)
        return Lifeline(found["socket"], found["number"], found["of"], socket.socket(fileno=found["lifeline"]))

    def end_with_parent(self, shutdown_s: float) -> None:
        """From now on: SIGTERM when the parent is gone, and no way to outlive that for long."""
        Thread(target=self._wait, args=(shutdown_s,), name="kvfold-lifeline", daemon=True).start()

    def _wait(self, shutdown_s: float) -> None:
        with suppress(OSError):
            while self._parent.recv(1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(shutdown_s + _GRACE_S)
        os._exit(1)

    def listen(self, backlog: int) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(self.path)
        listening.listen(backlog)
        return listening

    def say_ready(self, body_bytes: int) -> None:
        """Requests are taken from here on."""
        with suppress(OSError):
            self._parent.sendall(json.dumps({"body_bytes": body_bytes}).encode() + b"\n")

    def leave(self) -> None:
        """Remove the socket, and after a parent that was killed its folder as well."""
        path = Path(self.path)
        with suppress(OSError):
            path.unlink()
        with suppress(OSError):
            path.parent.rmdir()

    def device(self, asked: str, num_gpus: int) -> str:
        """GPUs are dealt out in turn where none is named."""
        return f"cuda:{self.number % num_gpus}" if num_gpus and asked in ("auto", "cuda") else asked

    def num_sharing(self, asked: str, num_gpus: int) -> int:
        """Replicas on this one's device, itself included."""
        is_dealt = self.device(asked, num_gpus) != asked
        return len(range(self.number % num_gpus, self.of, num_gpus)) if is_dealt else self.of
