"""Output of `kvfold serve --log json`: every line on stdout and stderr is a JSON object.

A line that is none, such as progress, a warning, an error or what a library prints, becomes the `event` of one.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, cast

from kvfold.serve.ops.log_format import JsonLines

_LEVELS = {"error: ": logging.ERROR, "warning: ": logging.WARNING}


def json_line(event: str, level: int = logging.INFO, **facts: str) -> str:
    """The line that a logger would write."""
    names = {"levelno": level, "levelname": logging.getLevelName(level)}
    return JsonLines().format(logging.makeLogRecord({"msg": event, "facts": facts, **names}))


class JsonStream(io.TextIOBase):
    """Passes lines on to `stream` as JSON objects; lines of several threads do not mix."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._begun: dict[int, str] = {}  # by thread

    def write(self, text: str) -> int:
        with self._lock:
            thread = threading.get_ident()
            *lines, rest = (self._begun.pop(thread, "") + text).replace("\r", "\n").split("\n")
            if rest:
                self._begun[thread] = rest
            self._pass_on(lines)
        return len(text)

    def end(self) -> None:
        """Lines that were begun end here."""
        with self._lock:
            self._pass_on([*self._begun.values()])
            self._begun.clear()

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def _pass_on(self, lines: list[str]) -> None:
        for line in filter(str.strip, lines):
            self._stream.write(f"{line if _is_object(line) else _wrapped(line)}\n")
            self._stream.flush()


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _wrapped(line: str) -> str:
    for prefix, level in _LEVELS.items():
        if line.startswith(prefix):
            return json_line(line.removeprefix(prefix), level)
    return json_line(line)


@contextmanager
def json_output() -> Iterator[None]:
    """Turn stdout and stderr into JSON lines; an exception becomes one line with its traceback, and exit code 1."""
    out, errors = JsonStream(sys.stdout), JsonStream(sys.stderr)
    with redirect_stdout(cast("IO[str]", out)), redirect_stderr(cast("IO[str]", errors)):
        try:
            yield
        except Exception:
            print(json_line("failed", logging.ERROR, error=traceback.format_exc()), file=sys.stderr)
            raise SystemExit(1) from None
        finally:
            out.end()
            errors.end()
