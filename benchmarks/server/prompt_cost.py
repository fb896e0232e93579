"""What does a request cost before it is admitted? CPU seconds to render and tokenize it, and to refuse a long body.

    python -m benchmarks.server prompt_cost [--model smollm2-135m] [--repeats 5] [--server] [--save]

The tokenizer is the model's; the template here has tools, each on a line as JSON, and calls as <tool_call>, as Qwen 2.5
has them. CPU seconds are of all threads, the median of the repeats; a linear cost doubles with the count. `--server`
starts `kvfold serve` and sends it bodies of 30 MB, with their length in the head and in chunks: CPU seconds are those
of its process, and `others_ms` is how long a small request takes that is sent right behind (`alone_ms`: on its own).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import argument_parser
from benchmarks.rows import append_row, facts
from benchmarks.server.client import Served, served
from kvfold.models.loader import load_tokenizer
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.prompt import PromptRenderer

COUNTS = (50, 100, 200, 400, 800, 1000, 1600)
_BODY_BYTES = 30_000_000
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
_USER = Block("text", "user", "What is the weather in Paris?", 0)
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tools(count: int) -> list[Block]:
    common = {"description": "Look it up.", "parameters": _SCHEMA}
    return [*(Block("tool", data={"name": f"tool_{i}", **common}) for i in range(count)), _USER]


def calls(count: int) -> list[Block]:
    data = {"id": "1", "name": "look", "arguments": {"city": "Paris"}}
    made = [Block("tool_use", "assistant", message=1, data=data) for _ in range(count)]
    return [_USER, *made, Block("text", "user", "And tomorrow?", 2)]


def messages(count: int) -> list[Block]:
    return [Block("text", "user" if i % 2 == 0 else "assistant", _USER.text, i) for i in range(count)]


def measure_prompts(model: str, repeats: int) -> dict[str, list[float]]:
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = _TEMPLATE
    renderer = PromptRenderer(tokenizer)
    kinds: tuple[Callable[[int], list[Block]], ...] = (tools, calls, messages)
    found = {make.__name__: [_cpu_s(renderer, make(count), repeats) for count in COUNTS] for make in kinds}
    print(f"{'CPU s':<10}" + "".join(f"{count:>9}" for count in COUNTS))
    for name, row in found.items():
        print(f"{name:<10}" + "".join(f"{seconds:>9.3f}" for seconds in row))
    return found


def _cpu_s(renderer: PromptRenderer, blocks: list[Block], repeats: int) -> float:
    request, found = ChatRequest("m", blocks, 1), []
    renderer.prompt(request)
    for _ in range(repeats):
        began = time.process_time()
        renderer.prompt(request)
        found.append(time.process_time() - began)
    return statistics.median(found)


def measure_server(model: str, repeats: int) -> dict[str, Any]:
    with served(model, "--memory", "256MB", "--host-memory", "64MB") as server:
        small = [{"role": "user", "content": "hi"}]
        server.count(small)
        found = {"alone_ms": _median_ms(lambda: server.count(small), repeats)}
        for name, head in (("length", f"content-length: {_BODY_BYTES}"), ("chunks", "transfer-encoding: chunked")):
            rows = [_refuse(server, head, small) for _ in range(repeats)]
            for field in ("cpu_s", "others_ms", "status"):
                found[f"{name}_{field}"] = statistics.median(row[field] for row in rows)
    for field, value in found.items():
        print(f"{field:<20}{value:>9.3f}")
    return found


def _median_ms(call: Callable[[], object], repeats: int) -> float:
    def once() -> float:
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)

    return statistics.median(once() for _ in range(repeats))


def _refuse(server: Served, head: str, small: list[dict[str, Any]]) -> dict[str, float]:
    """Send a long body as far as it is taken, and a small request behind it."""
    before = _process_s(server.process.pid)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        lines = ["POST /v1/messages HTTP/1.1", "host: localhost", "content-type: application/json", head, "", ""]
        connection.sendall("\r\n".join(lines).encode())
        piece = b"x" * 100_000
        framed = piece if "length" in head else b"%x\r\n%s\r\n" % (len(piece), piece)
        try:
            for _ in range(_BODY_BYTES // len(piece)):
                connection.sendall(framed)
        except OSError:
            pass  # the server has closed: it has said all it has to say
        others_ms = _median_ms(lambda: server.count(small), 1)
        try:
            status = int(connection.recv(65536).split()[1])
        except (OSError, IndexError):
            status = 0
    return {"cpu_s": _process_s(server.process.pid) - before, "others_ms": others_ms, "status": status}


def _process_s(pid: int) -> float:
    """CPU seconds of a process so far, as Linux counts them: in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("server prompt_cost", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--server", action="store_true", help="bodies of 30 MB to a server, too")
    parser.add_argument("--save", action="store_true", help="append a row to benchmarks/results/prompt_cost.jsonl")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"counts": COUNTS, "cpu_s": measure_prompts(options.model, options.repeats)}
    if options.server:
        found["server"] = measure_server(options.model, options.repeats)
    row = facts(model=options.model, repeats=options.repeats) | found
    if options.save:
        append_row("prompt_cost", row)
    print(json.dumps(row))
