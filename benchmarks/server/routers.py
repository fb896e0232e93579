"""Do routers that others made keep conversations where their prefixes are, before two servers with a shared Redis?

    python -m benchmarks.server routers [--bin FOLDER] [--conversations 40] [--turns 5] [--save] [-- SERVE OPTIONS]

The conversations of `python -m benchmarks.server replicas`, through smg and vllm-router as in docs/replicas.md.
Asked: hit rates within 1 point of one server, and 40 to 60 % of the requests at each of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.commands import argument_parser
from benchmarks.rows import append_row, facts
from benchmarks.server.client import Served, served
from benchmarks.server.replicas import OPTIONS, converse, random_model

_ROUTERS = {
    "smg": ("launch", "--policy", "cache_aware"),
    "vllm-router": ("--policy", "cache_aware", "--cache-threshold", "0.8", "--balance-abs-threshold", "4"),
}
_START_S = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def process(words: Sequence[str], port: int, url: str | None = None) -> Iterator[None]:
    """A program of ours, from the moment at which it listens, or answers at `url`, to the end."""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            end = time.monotonic() + _START_S
            while not _answers(port, url):
                if running.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"`{' '.join(words)}` did not start")
                time.sleep(0.2)
            yield
        finally:
            running.kill()


def _answers(port: int, url: str | None) -> bool:
    try:
        if url is None:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        with urlopen(url, timeout=5) as answer:
            return bool(json.loads(answer.read()).get("data"))
    except (OSError, ValueError):
        return False


def num_requests(server: Served) -> float:
    """Chat completions that it has answered."""
    found = server.metrics().items()
    return sum(value for name, value in found if name.startswith("kvfold_requests_total") and "chat" in name)


def routed(name: str, args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Two servers anew, since the router before has filled their caches."""
    port, redis_port = free_port(), free_port()
    with ExitStack() as stack:
        redis = ["redis-server", "--port", str(redis_port), "--save", "", "--appendonly", "no"]
        stack.enter_context(process(redis, redis_port))
        options = (*OPTIONS, "--redis", f"redis://127.0.0.1:{redis_port}", *args.options)
        servers = [stack.enter_context(served(model, *options)) for _ in range(2)]
        words = [str(shutil.which(name, path=_path(args))), *_ROUTERS[name], "--host", "127.0.0.1", "--port", str(port)]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        words += ["--worker-urls", *(f"http://127.0.0.1:{server.port}" for server in servers)]
        stack.enter_context(process(words, port, f"http://127.0.0.1:{port}/v1/models"))
        before = list(map(num_requests, servers))
        found = converse(Served(servers[0].process, port, servers[0].model), args)
        counts = [num_requests(server) - start for server, start in zip(servers, before, strict=True)]
    return {"router": name, "hit_rate": found.hit_rate, "shares": [count / sum(counts) for count in counts]}


def _path(args: argparse.Namespace) -> str:
    return os.pathsep.join((args.bin, os.environ["PATH"]))


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("server routers", __doc__)
    parser.add_argument("--bin", default="", metavar="FOLDER", help="where smg and vllm-router are, if not on PATH")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/routers.jsonl")
    parser.add_argument("options", nargs="*", metavar="SERVE OPTIONS", help="of `kvfold serve`, behind --")
    args = parser.parse_args(arguments)
    missing = [name for name in ("redis-server", *_ROUTERS) if shutil.which(name, path=_path(args)) is None]
    if missing:
        raise SystemExit(f"not found: {', '.join(missing)}; docs/replicas.md says how to install the routers")
    about = facts(conversations=args.conversations, turns=args.turns, seed=args.seed, options=args.options)
    with tempfile.TemporaryDirectory() as folder:
        model = str(random_model(Path(folder)))
        with served(model, *OPTIONS, *args.options) as one:
            alone = converse(one, args).hit_rate
        for name in _ROUTERS:
            found = routed(name, args, model)
            shares = ", ".join(f"{share:.0%}" for share in found["shares"])
            print(f"{name:<12} {found['hit_rate']:.1%} read, one server {alone:.1%}; requests: {shares}", flush=True)
            row = {**about, **found, "hit_rate_one": alone}
            if args.save:
                append_row("routers", row)
            print(json.dumps(row))
