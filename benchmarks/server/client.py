"""`kvfold serve` as a process, and requests to it that are timed: what the benchmarks of the server share."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import kvfold
from benchmarks.rows import ROOT
from kvfold.errors import InputError

_TIMEOUT_S = 3600.0
_TEXT = (Path(kvfold.__file__).parent / "data" / "handbook.txt").read_text(encoding="utf-8")

Turn = dict[str, Any]


@dataclass
class Timed:
    """A streamed reply. `first_s`: from sending to the first text. `gaps_s`: between texts after it."""

    status: int
    first_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    is_cut: bool = False  # by the client
    error: str | None = None  # with which the server broke off the stream

    @property
    def num_read(self) -> int:
        return int(self.usage.get("cache_read_input_tokens", 0))

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt, however they are billed."""
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        return sum(int(self.usage.get(name, 0)) for name in names)


class Served:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[str], port: int, model: str, key: str | None = None) -> None:
        self.process, self.port, self.model = process, port, model
        self._headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        if key is not None:
            self._headers["x-api-key"] = key

    def as_tenant(self, key: str) -> Served:
        """The same server, asked with a key."""
        return Served(self.process, self.port, self.model, key)

    def body(self, messages: list[dict[str, Any]], max_tokens: int, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": max_tokens, "messages": messages, "temperature": 0, **more}

    def ask(self, body: dict[str, Any], *, hang_up_after: int | None = None) -> Timed:
        """Stream a reply of /v1/messages, or so many texts of it; what the server refuses is a status."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        began = time.perf_counter()
        try:
            connection.request("POST", "/v1/messages", json.dumps({**body, "stream": True}), self._headers)
            answer = connection.getresponse()
            found = Timed(answer.status)
            if answer.status == 200:
                _read(answer, found, began, hang_up_after)
            found.total_s = time.perf_counter() - began
            return found
        except (OSError, http.client.HTTPException):
            return Timed(0, total_s=time.perf_counter() - began)
        finally:
            connection.close()

    def count(self, messages: list[dict[str, Any]]) -> int:
        body = json.dumps({"model": self.model, "messages": messages}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/messages/count_tokens"
        with urlopen(Request(url, body, self._headers), timeout=_TIMEOUT_S) as answer:
            return int(json.load(answer)["input_tokens"])

    def metrics(self) -> dict[str, float]:
        """By name with labels."""
        asked = Request(f"http://127.0.0.1:{self.port}/metrics", headers=self._headers)
        with urlopen(asked, timeout=_TIMEOUT_S) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    @property
    def resident_bytes(self) -> int:
        """Of the process, as the kernel counts it."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def filler() -> str:
    """A text of 786 words."""
    return _TEXT


def text_of(num_tokens: int, name: str, server: Served) -> str:
    """About so many tokens, different from the first word on for every name."""
    words = f"{name}: {_TEXT}".split()
    per_word = server.count([user(" ".join(words))]) / len(words)
    repeated = words * (1 + int(num_tokens / per_word / len(words)))
    return " ".join(repeated[: int(num_tokens / per_word)])


def user(*texts: str, marker: Turn | None = None) -> Turn:
    """One message; a marker stands on the first of its texts."""
    blocks: list[Turn] = [{"type": "text", "text": text} for text in texts]
    if marker is not None:
        blocks[0]["cache_control"] = marker
    return {"role": "user", "content": blocks}


def _read(answer: http.client.HTTPResponse, found: Timed, began: float, hang_up_after: int | None) -> None:
    last = began
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        event, now = json.loads(line[6:]), time.perf_counter()
        if event["type"] == "content_block_delta":
            if found.first_s is None:
                found.first_s = now - began
            else:
                found.gaps_s.append(now - last)
            last = now
            found.text += event["delta"]["text"]
            if len(found.gaps_s) + 1 == hang_up_after:
                found.is_cut = True
                return
        elif event["type"] == "message_start":
            found.usage = event["message"]["usage"]
        elif event["type"] == "message_delta":
            found.usage = event["usage"]
        elif event["type"] == "error":
            found.error = event["error"]["type"]


@contextmanager
def served(model: str, *options: str, log: Path | None = None) -> Iterator[Served]:
    """Run it on a free port until the end; its log goes to a file, or nowhere. InputError with what it says if it ends
    before it serves."""
    command = [sys.executable, "-m", "kvfold", "serve", "--model", model, "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with open(log, "w+", encoding="utf-8") if log else tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            line = next((line for line in lines if "http://" in line), None)
            if line is None:
                code = process.wait()
                errors.seek(0)
                said = errors.read().strip().rpartition("\n")[2].removeprefix("error: ")
                raise InputError(f"{said} (`{' '.join(command[2:])}` ended with exit code {code})")
            yield Served(process, int(line.split("http://")[1].split()[0].rpartition(":")[2]), line.split(", ")[0])
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
