"""`kvfold serve --replicas N` as it is started from a shell, with the tiny model of a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai

from kvfold.serve.replicas.lifeline import VARIABLE
from tests import tiny
from tests.serve.running import TOOL_TEMPLATE

_TOLD = f"{VARIABLE}=".encode()


def tiny_folder(folder: Path) -> Path:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    tiny.build("llama").save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return folder / "tiny"


class Command:
    """The parent process and its address."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)

    @property
    def replicas(self) -> list[int]:
        """Processes, by the number of the replica."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                told = [one for one in (path / "environ").read_bytes().split(b"\0") if one.startswith(_TOLD)]
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent == self.process.pid and told:
                found[json.loads(told[0].removeprefix(_TOLD))["number"]] = int(path.name)
        return [found[number] for number in sorted(found)]

    def ask(self, text: str, question: str = "who?", **more: Any) -> tuple[Any, int]:
        """The reply to a prompt whose long beginning is marked, and the replica that wrote it."""
        blocks: Any = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
        blocks.append({"type": "text", "text": question})
        asked: Any = {"model": "tiny", "max_tokens": 6, "messages": [{"role": "user", "content": blocks}], **more}
        raw = self.anthropic.messages.with_raw_response.create(**asked)
        return raw.parse(), int(raw.headers["x-kvfold-replica"])


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def serving(model: Path, *options: str, log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Command]:
    """Killed at the end if the test has not ended it."""
    words = [
        "serve",
        "--model",
        str(model),
        "--port",
        "0",
        "--memory",
        "64MB",
        "--host-memory",
        "16MB",
        "--log",
        "json",
    ]
    words += ["--cache-min-tokens", "32", "--temperature", "0", *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfold", *words], stdout=subprocess.PIPE, stderr=errors, text=True, env=variables
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield Command(process, json.loads(line)["url"])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
