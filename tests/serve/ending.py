"""Servers that a test ends with signals, each a process of its own, forked from one that has imported everything.

python -m tests.serve.ending        reads a line for each server: what is to be wrong with it, and its limits, as JSON
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, NoReturn

from kvfold.engine.scheduling.scheduler import Scheduler
from kvfold.engine.scheduling.task import Task
from kvfold.serve.server import end_process, open_store, serve, service_of
from kvfold.serve.settings import Limits, Settings
from kvfold.store.prefixes import Prefixes
from tests.serve.running import tool_model

_STUCK_S = 120.0


def _sleep(*given: Any, **options: Any) -> Any:
    time.sleep(_STUCK_S)


def _raise(*given: Any, **options: Any) -> Any:
    raise RuntimeError("broken")


def _few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


WRONG: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "prefill": lambda: setattr(Task, "prefill", _sleep),
    "lookup": lambda: setattr(Prefixes, "lookup", _sleep),
    "loop": lambda: setattr(Scheduler, "_end_overdue", _raise),
    "descriptors": _few_descriptors,
}


def _serve(wrong: str, limits: dict[str, Any]) -> NoReturn:
    WRONG[wrong]()
    model = tool_model()
    settings = Settings(("tiny",), Limits(**limits), cache_min_tokens=32, temperature=0.0)
    with service_of(model, "full", settings, open_store(model, host_bytes=16 << 20)) as service:
        code = serve(service, "127.0.0.1", 0, lambda port: print(os.getpid(), port, flush=True), lambda trace: None)
    end_process(code)


def main() -> None:
    for line in sys.stdin:
        if os.fork() == 0:
            _serve(*json.loads(line))
        print("ended", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)


class Zygote:
    """Starts servers, one at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._input, self._output = _both(process)

    def start(self, wrong: str, **limits: Any) -> tuple[int, int]:
        """The process and the port of a server that takes requests."""
        print(json.dumps((wrong, limits)), file=self._input, flush=True)
        process, port = self._output.readline().split()
        return int(process), int(port)

    def exit_code(self) -> int:
        """Of the server, once it has ended."""
        return int(self._output.readline().removeprefix("ended "))


def _both(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


@contextmanager
def zygote() -> Iterator[Zygote]:
    command = [sys.executable, "-m", "tests.serve.ending"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        yield Zygote(process)
    finally:
        os.killpg(process.pid, 9)
        process.wait()


if __name__ == "__main__":
    main()
