"""What does the prompt cache of a running server save? The first token of a prompt whose long beginning is cached.

    python -m benchmarks.server prefix [--model smollm2-135m] [--tokens 4096] [--repeats 3] [--save] [-- SERVE OPTIONS]

`kvfold serve` runs three times on one folder, so that what is read comes from the arena, from the host's memory, and
from the disk (whose blocks the kernel may still hold); what does not fit elsewhere is the point of the small sizes.

    cold      another beginning each time, nothing is cached
    arena     the cached beginning in the memory of the device, another question each time
    restart   the first request after a restart on the same folder: a hit, or the run fails
    host      as arena, with an arena whose half is too small for the beginning
    disk      as host, with no room in the host's memory either

Then traffic that shares beginnings, with markers and without: questions about documents, and conversations of several
rounds, `--clients` at a time, in requests per second. Targets: host at most 0.05 of cold, disk at most 0.1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvfold
from benchmarks.commands import argument_parser
from benchmarks.rows import append_row, facts
from benchmarks.server.client import Served, Timed, Turn, served, text_of, user

_HOUR = {"type": "ephemeral", "ttl": "1h"}
_QUESTIONS = ("Who wrote this?", "What is it about?", "Name one rule.", "What comes last?", "What is missing?")
_TARGETS = {"host": 0.05, "disk": 0.1}


def first_token(server: Served, prefix: str, number: int) -> Timed:
    question = f"{number}. {_QUESTIONS[number % len(_QUESTIONS)]}"
    found = server.ask(server.body([user(prefix, question, marker=_HOUR)], 2))
    print(f"{found.first_s or 0:.3f} s, {found.num_read} of {found.num_prompt} tokens read", file=sys.stderr)
    if found.status != 200 or found.first_s is None:
        raise SystemExit(f"the server answered with status {found.status}")
    return found


def hits(server: Served, prefix: str, repeats: int, start: int) -> list[float]:
    """Seconds of requests that all read the prefix."""
    found = [first_token(server, prefix, start + i) for i in range(repeats)]
    if not all(one.num_read for one in found):
        raise SystemExit("a request was no hit")
    return [one.first_s for one in found if one.first_s is not None]


# Time to the first token


def measure(args: argparse.Namespace, disk: Path) -> dict[str, Any]:
    store = ("--disk", str(disk), "--disk-size", "20GB")
    found: dict[str, Any] = {}
    with served(args.model, *store, "--memory", "2GB", *args.options) as server:
        first_token(server, "warm up", 0)
        texts = [text_of(args.tokens, f"Copy {i}", server) for i in range(args.repeats)]
        asked = [first_token(server, text, 0) for text in texts]
        found["cold"], prefix = [one.first_s for one in asked], texts[-1]
        found["prefix_tokens"] = asked[-1].usage["cache_creation_input_tokens"]
        found["arena"] = hits(server, prefix, args.repeats, 1)
        found["traffic"] = [*documents(server, args), *chats(server, args)]
    num_bytes = int(found["prefix_tokens"]) * args.slot_bytes
    small = (*args.options, "--memory", str(int(1.6 * num_bytes)))  # half of it is less than the prefix
    with served(args.model, *store, *small) as server:
        again = first_token(server, prefix, 100)
        found["restart"], found["restart_read_tokens"] = [again.first_s], again.num_read
        hits(server, prefix, 1, 101)  # what was read goes to the host in the background
        found["host"] = hits(server, prefix, args.repeats, 102)
    with served(args.model, *store, *small, "--host-memory", "1MB") as server:
        found["disk"] = hits(server, prefix, args.repeats + 1, 200)[1:]
    return found


# Traffic


def documents(server: Served, args: argparse.Namespace) -> list[Turn]:
    """Questions about documents, in turn."""
    texts = [text_of(args.document, f"Document {i}", server) for i in range(args.documents)]

    def ask(marker: Turn | None, run: str) -> Callable[[int], Timed]:
        def one(number: int) -> Timed:
            text, question = f"{run} {texts[number % len(texts)]}", _QUESTIONS[number % len(_QUESTIONS)]
            return server.ask(server.body([user(text, question, marker=marker)], args.reply))

        return one

    return both("documents", ask, args.documents * args.questions, args.clients)


def chats(server: Served, args: argparse.Namespace) -> list[Turn]:
    """Conversations that grow; each round reads what the rounds before it cached."""
    opening = text_of(args.document, "Chat", server)

    def ask(marker: Turn | None, run: str) -> Callable[[int], list[Timed]]:
        more = {} if marker is None else {"cache_control": marker}

        def one(number: int) -> list[Timed]:
            turns, found = [user(f"{run} {number} {opening}")], list[Timed]()
            for i in range(args.rounds):
                found.append(server.ask(server.body(turns, args.reply, **more)))
                turns += [{"role": "assistant", "content": found[-1].text or "-"}, user(_QUESTIONS[i % 5])]
            return found

        return one

    return both("chats", ask, args.chats, args.clients)


def both(name: str, ask: Callable[..., Callable[[int], Any]], count: int, clients: int) -> list[Turn]:
    """A row without the cache and one with it; the runs have no text in common."""
    return [
        _row(name, caching, ask(_HOUR if caching == "on" else None, f"Run {caching}."), count, clients)
        for caching in ("off", "on")
    ]


def _row(name: str, caching: str, one: Callable[[int], Any], count: int, clients: int) -> Turn:
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        parts = list(threads.map(one, range(count)))
    seconds = time.perf_counter() - began
    asked = [timed for part in parts for timed in (part if isinstance(part, list) else [part])]
    if any(timed.status != 200 or timed.error for timed in asked):
        raise SystemExit(f"{name}: answers {sorted({timed.error or str(timed.status) for timed in asked})}")
    firsts = [timed.first_s for timed in asked if timed.first_s is not None]
    return {
        "traffic": name,
        "cache": caching,
        "requests": len(asked),
        "per_s": len(asked) / seconds,
        "first_s": statistics.median(firsts),
        "read_tokens": sum(timed.num_read for timed in asked),
        "prompt_tokens": sum(timed.num_prompt for timed in asked),
    }


# The command


def slot_bytes(model: str) -> int:
    """Of a token, in a cache that keeps everything."""
    spec = kvfold.load(model, device="cpu").spec  # a GPU is the server's alone
    return sum(2 * layer.num_kv_heads * layer.head_dim for layer in spec.layers) * spec.kv_dtype.itemsize


def show(found: dict[str, Any]) -> dict[str, float]:
    """Print a table; ratios to cold."""
    cold = statistics.median(found["cold"])
    ratios = {}
    for name in ("cold", "arena", "restart", "host", "disk"):
        median = statistics.median(found[name])
        ratios[name] = median / cold
        line = f"{name:<8} {median:8.3f} s  {ratios[name]:6.3f} of cold"
        print(line if name not in _TARGETS else f"{line}  {_verdict(ratios[name], _TARGETS[name])}")
    for row in found["traffic"]:
        share = row["read_tokens"] / row["prompt_tokens"]
        print(f"{row['traffic']:<10} cache {row['cache']:<4} {row['per_s']:7.2f} requests/s  {share:4.0%} read")
    return ratios


def _verdict(ratio: float, target: float) -> str:
    return f"target {target:g}: {'met' if ratio <= target else 'missed'}"


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("server prefix", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096, help="of the cached beginning, about")
    parser.add_argument("--repeats", type=int, default=3, help="requests of each kind")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--document", type=int, default=1500, help="tokens of a document, about")
    parser.add_argument("--questions", type=int, default=6, help="about each document")
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="of each conversation")
    parser.add_argument("--reply", type=int, default=16, help="tokens of each reply, at most")
    parser.add_argument("--clients", type=int, default=4, help="requests at a time")
    parser.add_argument("--save", action="store_true", help="append the result to benchmarks/results/prefix.jsonl")
    parser.add_argument("options", nargs="*", metavar="SERVE OPTIONS", help="of `kvfold serve`, behind --")
    args = parser.parse_args(arguments)
    args.slot_bytes = slot_bytes(args.model)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder) / "disk")
    ratios = show(found)
    row = {**facts(**{name: value for name, value in vars(args).items() if name != "save"}), **found, "ratios": ratios}
    if args.save:
        append_row("prefix", row)
    print(json.dumps(row))
