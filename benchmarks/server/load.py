"""Does the server hold under load? Many streaming clients at once for minutes, and what is left when they have gone.

    python -m benchmarks.server load [--clients 64] [--minutes 10] [--model smollm2-135m] [--tenants 8] [--hostile 0.1]
                                     [--out FILE] [-- SERVE OPTIONS]

Clients send one request after another: a short question, a question about one of a few documents (whose beginning is
marked to be cached), or the next round of a conversation; some hang up in the middle of a reply. What is counted:
answers by status, or by what broke them off; seconds to the first text and between texts; and, over time, the memory
of the process and of the arena. When all are done and nothing runs, every page of the arena is free or belongs to a
stored prefix; what is not has leaked, and the run fails. With `--hostile 0.1` one request in ten is of the kinds of
hostile.py beside this file, from a tenant of its own; these are counted apart, and the run fails if a well-behaved
request does. The result goes to FILE (benchmarks/results/serve_load.json), and `--page FILE` makes a section for
docs/serving.md of such a file.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from benchmarks.commands import argument_parser
from benchmarks.rows import RESULTS, facts, markdown_table, percentile
from benchmarks.server.client import Served, Timed, served, text_of, user
from benchmarks.server.hostile import KEY, Attack
from kvfold.atomic_io import write_whole

_SAMPLE_S = 5.0
_DRAIN_S = 600.0
_MARKER = {"type": "ephemeral"}
_QUESTIONS = ("Who wrote this?", "What is it about?", "Name one rule.", "What comes last?", "Tell me more.")
_KINDS = ("short", "document", "chat")
_HANG_UP = 0.05  # of requests


class Log:
    """What clients saw; written by all of them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.statuses: Counter[str] = Counter()
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.num_read = self.num_prompt = 0

    def note(self, found: Timed) -> None:
        with self._lock:
            self.statuses["hung up" if found.is_cut else found.error or str(found.status or "no answer")] += 1
            self.gaps_s += found.gaps_s
            if found.first_s is not None:
                self.first_s.append(found.first_s)
            self.num_read += found.num_read
            self.num_prompt += found.num_prompt


class Client:
    """Asks until it is told to stop; `number` seeds what it asks."""

    def __init__(self, number: int, server: Served, documents: list[str], log: Log, reply: int, attack: Attack) -> None:
        self._random, self._attack = random.Random(number), attack
        self._server, self._documents, self._log, self._reply = server, documents, log, reply
        self._turns: list[dict[str, Any]] = []
        self._number = number

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            self._attack.maybe(self._random.random())
            kind = self._random.choice(_KINDS)
            hang_up = self._random.randint(1, 4) if self._random.random() < _HANG_UP else None
            found = self._server.ask(self._body(kind), hang_up_after=hang_up)
            self._log.note(found)
            if kind == "chat":
                self._go_on(found)
            if found.status in (429, 529):
                time.sleep(1.0)  # as `retry-after` says

    def _body(self, kind: str) -> dict[str, Any]:
        question = self._random.choice(_QUESTIONS)
        if kind == "short":
            return self._server.body([user(f"{self._number}: {question}")], self._reply)
        if kind == "document":
            turns = [user(self._random.choice(self._documents), question, marker=_MARKER)]
            return self._server.body(turns, self._reply)
        self._turns.append(user(f"{self._number}: {question}"))
        return self._server.body(self._turns, self._reply, cache_control=_MARKER)

    def _go_on(self, found: Timed) -> None:
        """A conversation begins anew after a few rounds, or when a reply failed."""
        if found.status != 200 or found.error or found.is_cut or len(self._turns) > 10:
            self._turns = []
        else:
            self._turns.append({"role": "assistant", "content": found.text or "-"})


class Watch:
    """Samples of the server's memory, until it is stopped."""

    def __init__(self, server: Served) -> None:
        self._server, self._began, self._over = server, time.monotonic(), Event()
        self.samples: list[dict[str, float]] = []
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.samples.append({"s": round(time.monotonic() - self._began, 1), **state(self._server)})

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def state(server: Served) -> dict[str, float]:
    found = server.metrics()
    lent = found["kvfold_arena_bytes"] - found["kvfold_arena_free_bytes"]
    return {
        "resident_bytes": server.resident_bytes,
        "arena_bytes": lent,
        "prefix_bytes": found["kvfold_arena_prefix_bytes"],
        "running": found["kvfold_requests_running"],
        "waiting": found["kvfold_requests_waiting"],
    }


def settle(server: Served) -> dict[str, float]:
    """The state once nothing runs or waits."""
    until = time.monotonic() + _DRAIN_S
    while True:
        found = state(server)
        if not found["running"] and not found["waiting"]:
            return found
        if time.monotonic() > until:
            raise SystemExit(f"{found['running']:.0f} requests still run {_DRAIN_S:.0f} s after the last client left")
        time.sleep(0.5)


def load(args: argparse.Namespace, server: Served) -> dict[str, Any]:
    """Everything measured on one server."""
    server.ask(server.body([user("warm up")], 4))
    documents = [text_of(args.document, f"Document {i}", server) for i in range(args.documents)]
    log, before = Log(), settle(server)
    began = time.monotonic()
    attack = Attack(server, args.hostile)
    own = [server.as_tenant(key) for key in _keys(args.tenants)] or [server]
    clients = [Client(i, own[i % len(own)], documents, log, args.reply, attack) for i in range(args.clients)]
    threads = [Thread(target=client.run, args=(began + 60 * args.minutes,)) for client in clients]
    watch = Watch(server)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    attack.end()
    watch.stop()
    after = settle(server)
    return {
        "seconds": seconds,
        "statuses": dict(log.statuses.most_common()),
        "per_s": log.statuses.total() / seconds,
        "texts_per_s": (len(log.gaps_s) + len(log.first_s)) / seconds,
        "first_s": percentiles(log.first_s),
        "gap_s": percentiles(log.gaps_s),
        "read_share": log.num_read / max(log.num_prompt, 1),
        "num_hostile": attack.num_sent,
        "hostile_outcomes": {kind: dict(counts) for kind, counts in attack.outcomes.items() if counts},
        "before": before,
        "after": after,
        "leaked_bytes": after["arena_bytes"] - after["prefix_bytes"],
        "samples": watch.samples,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(values, percent) for percent in (50, 90, 95, 99)} if values else {}


def _keys(num_tenants: int) -> list[str]:
    """API keys of well-behaved tenants."""
    return [f"key-{i}" for i in range(num_tenants)]


def write_keys(path: Path, num_tenants: int) -> None:
    lines = [f"{key} tenant-{i}" for i, key in enumerate(_keys(num_tenants))]
    path.write_text("\n".join([*lines, f"{KEY} hostile", ""]), encoding="utf-8")


def hostile_text(outcomes: dict[str, dict[str, int]]) -> str:
    total = sum((Counter(counts) for counts in outcomes.values()), Counter[str]())
    return ", ".join(f"{count} x {outcome}" for outcome, count in total.most_common()) or "none"


def page(found: dict[str, Any]) -> str:
    """A section for docs/serving.md."""
    first, gap, samples = found["first_s"], found["gap_s"], found["samples"]
    middle = samples[len(samples) // 2]["resident_bytes"] if samples else found["after"]["resident_bytes"]
    statuses = ", ".join(f"{count} x {status}" for status, count in found["statuses"].items())
    rows = {
        "answers by status": statuses,
        "requests, texts per second": f"{found['per_s']:.2f}, {found['texts_per_s']:.1f}",
        "first text (s): p50, p90, p95, p99": ", ".join(f"{value:.2f}" for value in first.values()),
        "between texts (s): p50, p90, p95, p99": ", ".join(f"{value:.3f}" for value in gap.values()),
        "prompt tokens read from the cache": f"{found['read_share']:.0%}",
        "hostile requests beside these": f"{found['num_hostile']}, {hostile_text(found['hostile_outcomes'])}",
        "memory of the process (MB): half-way, at the end": f"{middle / 1e6:.0f}, "
        f"{found['after']['resident_bytes'] / 1e6:.0f}",
        "bytes of the arena that leaked": f"{found['leaked_bytes']:.0f}",
    }
    about = (
        f"{found['clients']} streaming clients for {found['seconds'] / 60:.0f} minutes, {found['model']}, "
        f"{found['device']}, {found['threads']} threads, commit {found['commit']}, {found['date']}:"
    )
    names = ("model", "clients", "minutes", "documents", "document", "reply", "tenants", "hostile")
    given = [f"--{name} {found[name]}".removesuffix(".0") for name in names]
    options = ["--", *found["options"]] if found["options"] else []
    command = " ".join(["python -m benchmarks.server load", *given, *options])
    return "\n".join([about, "", f"```sh\n{command}\n```", "", markdown_table(["", ""], rows.items()), ""])


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("server load", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--document", type=int, default=1200, help="tokens of a document, about")
    parser.add_argument("--reply", type=int, default=48, help="tokens of a reply, at most")
    parser.add_argument("--tenants", type=int, default=0, metavar="N", help="API keys that clients share; 0: none")
    parser.add_argument("--hostile", type=float, default=0.0, metavar="SHARE", help="of requests, from 0 to 0.9")
    parser.add_argument("--out", type=Path, default=RESULTS / "serve_load.json", help="default: %(default)s")
    parser.add_argument("--page", type=Path, metavar="FILE", help="only print the section of docs for a result")
    parser.add_argument("options", nargs="*", metavar="SERVE OPTIONS", help="of `kvfold serve`, behind --")
    args = parser.parse_args(arguments)
    if args.page is not None:
        print(page(json.loads(args.page.read_text(encoding="utf-8"))), end="")
        return
    if not 0 <= args.hostile <= 0.9 or (args.hostile and not args.tenants):
        parser.error("--hostile is a share from 0 to 0.9 and needs --tenants: such requests have a key of their own")
    about = facts(**{name: value for name, value in vars(args).items() if name not in ("out", "page")})
    with tempfile.TemporaryDirectory() as folder:
        options = ["--memory", "2GB", "--disk", f"{folder}/prefixes", *args.options]
        if args.tenants:
            write_keys(Path(folder) / "keys", args.tenants)
            options += ["--keys", f"{folder}/keys"]
        with served(args.model, *options) as server:
            found = {**about, **load(args, server.as_tenant(_keys(1)[0]) if args.tenants else server)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out, json.dumps(found) + "\n")
    print(page(found))
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}))
    if found["leaked_bytes"]:
        raise SystemExit(f"{found['leaked_bytes']:.0f} bytes of the arena leaked")
    if failed := {status: count for status, count in found["statuses"].items() if status not in ("200", "hung up")}:
        raise SystemExit(f"well-behaved requests failed: {failed}")
