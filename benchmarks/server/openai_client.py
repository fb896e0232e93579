"""Streamed chat completions of any OpenAI server, timed: the same bodies go to kvfold and to its peers."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

from kvfold.errors import ModelError

_TIMEOUT_S = 3600.0
_REUSED = ("kvfold_reused_tokens_total", "vllm:prefix_cache_hits_total")


@dataclass(frozen=True)
class Asked:
    """A document, which is the system message, a question about it, and the tokens of the reply."""

    document: str
    question: str
    num_output: int


@dataclass(frozen=True)
class Answered:
    """`first_s`: from sending to the first text, or to the end of a reply without text."""

    first_s: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True)
class OpenAIServer:
    port: int
    model: str

    def ask(self, asked: Asked) -> Answered:
        """ModelError unless the reply has the length that was asked for."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        began = time.perf_counter()
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(self._body(asked)), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ModelError(f"the server answered with status {response.status}: {response.read(500).decode()}")
            found = _read(response, began)
        finally:
            connection.close()
        if found.num_output != asked.num_output:
            raise ModelError(f"a reply has {found.num_output} tokens; {asked.num_output} were asked for")
        return found

    def ask_all(self, all_asked: Sequence[Asked]) -> tuple[list[Answered], float]:
        """All at once, and the seconds until the last one has ended."""
        began = time.perf_counter()
        with ThreadPoolExecutor(len(all_asked)) as clients:
            found = list(clients.map(self.ask, all_asked))
        return found, time.perf_counter() - began

    def reused_tokens(self) -> int:
        """Prompt tokens so far whose KV cache came from the prefix cache, by the server's own metrics."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith(_REUSED)))

    def _body(self, asked: Asked) -> dict[str, Any]:
        messages = [{"role": "system", "content": asked.document}, {"role": "user", "content": asked.question}]
        sampling = {"temperature": 0, "max_tokens": asked.num_output, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": messages, **sampling, **stream}


def _read(response: http.client.HTTPResponse, began: float) -> Answered:
    first_s, usage = None, None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ModelError(f"the server broke the stream off: {event['error']}")
        usage = event.get("usage") or usage
        has_text = any(choice["delta"].get("content") or choice["finish_reason"] for choice in event["choices"])
        if first_s is None and has_text:
            first_s = time.perf_counter() - began
    if first_s is None or usage is None:
        raise ModelError("the server broke the stream off")
    return Answered(first_s, usage["prompt_tokens"], usage["completion_tokens"])
