"""How fast does `kvfold serve` answer beside vLLM, on the same machine, with the same requests?

    python -m benchmarks.serving_peers [--vllm-python /path/to/venv/bin/python] [--save] [-- KVFOLD SERVE OPTIONS]

Without --vllm-python kvfold alone is measured. Servers have as many threads, the same dtype of weights and KV caches,
and as much memory for KV caches; prefix caching is on. vLLM compiles the model, as it does by default, and has OpenMP
and tcmalloc preloaded as its guide for CPUs recommends, where they are found. All servers are started first and asked
in turn, never two at the same time, so that a machine whose clock moves is as fast for one as for the others. Every
round asks about new documents, by the same chat completions, greedy, each as long as it is asked to be (ignore_eos):

    cold      seconds to the first token of a prompt that is new
    hit       the same for another question on the same document, whose tokens the server has in its prefix cache
    burst     requests per second, where several at once ask about one new document
    decode    tokens per second of several replies at once to short prompts, their prefill included
    single    the same of one reply alone

Figures are medians over rounds. A hit is asked for as soon as the cold prompt has been answered. Four rounds of three
servers take ten minutes on two idle cores; what else runs on the machine is measured, too.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kvfold
from benchmarks.commands import argument_parser, positive, run_main
from benchmarks.rows import Row, report
from benchmarks.server.client import served
from benchmarks.server.openai_client import Asked, OpenAIServer
from benchmarks.server.vllm_process import preloaded, vllm_served, vllm_version
from kvfold.models.loader import load_tokenizer
from kvfold.policy.policy import Policy

MEASURES = ("cold_s", "hit_s", "burst_per_s", "decode_per_s", "single_per_s")
_POLICIES = "full,keydiff + 4x + int4"
_BESIDE = 512  # tokens of a prompt beside its document, and of its reply
_PAUSE_S = 2.0  # for background writes of the server that was asked before


@dataclass(frozen=True)
class Arm:
    """A server that is measured: its name, its policy, and what starts it."""

    server: str
    policy: str
    start: Callable[[], AbstractContextManager[OpenAIServer]]


@contextmanager
def kvfold_served(args: argparse.Namespace, policy: str) -> Iterator[OpenAIServer]:
    options = ("--policy", policy, "--dtype", args.dtype, "--memory", f"{args.memory << 30}", *args.options)
    with served(args.model, *options) as server:
        yield OpenAIServer(server.port, server.model)


@contextmanager
def front_served(
    args: argparse.Namespace, start: Callable[[], AbstractContextManager[OpenAIServer]]
) -> Iterator[OpenAIServer]:
    with start() as engine, served(args.model, "--engine", f"http://127.0.0.1:{engine.port}") as server:
        yield OpenAIServer(server.port, server.model)


def arms(args: argparse.Namespace, folder: Path) -> list[Arm]:
    found = [Arm("kvfold", policy, partial(kvfold_served, args, policy)) for policy in args.policies.split(",")]
    if args.vllm_python is None:
        print("vLLM is not measured: give --vllm-python /path/to/venv/bin/python", file=sys.stderr)
        return found
    words = ["--dtype", args.dtype, "--max-model-len", str(args.tokens + _BESIDE)]
    words += ["--enable-prefix-caching", "--generation-config", "vllm"]
    start = partial(vllm_served, args.vllm_python, args.model, *words, kv_gib=args.memory, log=folder / "vllm.log")
    name = f"vllm {vllm_version(args.vllm_python)}, compiled"
    print(f"{name} preloads {', '.join(preloaded(args.vllm_python)) or 'nothing'}", file=sys.stderr)
    fronts = [Arm(f"kvfold before {name}", "full", partial(front_served, args, start))] if args.front else []
    return [*found, Arm(name, "", start), *fronts]


class Documents:
    """Texts of a number of tokens, which differ from the first word on."""

    def __init__(self, model: str) -> None:
        self._tokenizer = load_tokenizer(model)

    def text(self, name: str, num_tokens: int) -> str:
        text = f"{name}. {kvfold.example_text()}"
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = (ids * (1 + num_tokens // len(ids)))[:num_tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def ask_document(server: OpenAIServer, make: Callable[[str, int], str], number: int, args: argparse.Namespace) -> Row:
    """A new prompt, and another question on its document at once."""
    one, before = make(f"Volume {number}", args.tokens), server.reused_tokens()
    cold = server.ask(Asked(one, "Who wrote this?", 1))
    between = server.reused_tokens()
    hit = server.ask(Asked(one, "What comes last?", 1))
    return {
        "cold_s": cold.first_s,
        "hit_s": hit.first_s,
        "prompt_tokens": cold.num_prompt,
        "cold_reused": between - before,
        "hit_reused": server.reused_tokens() - between,
    }


def ask_burst(server: OpenAIServer, make: Callable[[str, int], str], number: int, args: argparse.Namespace) -> Row:
    text, before = make(f"Burst {number}", args.tokens), server.reused_tokens()
    found, seconds = server.ask_all([Asked(text, f"What is rule {i}?", args.reply) for i in range(args.burst)])
    return {"burst_per_s": len(found) / seconds, "burst_reused": server.reused_tokens() - before}


def ask_replies(server: OpenAIServer, make: Callable[[str, int], str], number: int, args: argparse.Namespace) -> Row:
    texts = [make(f"Letter {i} of {number}", args.short) for i in range(args.replies)]
    found, seconds = server.ask_all([Asked(text, "Go on.", args.decode) for text in texts])
    return {"decode_per_s": sum(answer.num_output for answer in found) / seconds}


def ask_single(server: OpenAIServer, make: Callable[[str, int], str], number: int, args: argparse.Namespace) -> Row:
    found, seconds = server.ask_all([Asked(make(f"Postcard {number}", args.short), "Go on.", args.decode)])
    return {"single_per_s": sum(answer.num_output for answer in found) / seconds}


_PARTS = (ask_document, ask_burst, ask_replies, ask_single)


def rounds(args: argparse.Namespace) -> Iterator[dict[Arm, Row]]:
    """What each server measured in each round."""
    make = Documents(args.model).text
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        known = arms(args, Path(folder))
        servers = {}
        for arm in known:
            print(f"starting {arm.server} {arm.policy}", file=sys.stderr, flush=True)
            servers[arm] = running.enter_context(arm.start())
        for server in servers.values():
            server.ask(Asked(make("Warming", 64), "Who?", args.reply))
        for number in range(args.rounds):
            first = number % len(known)
            found: dict[Arm, Row] = {arm: {} for arm in known}
            for part in _PARTS:
                for arm in (*known[first:], *known[:first]):
                    time.sleep(_PAUSE_S)
                    found[arm] |= part(servers[arm], make, number, args)
            for arm, one in found.items():
                shown = ", ".join(f"{name} {one[name]:.3g}" for name in MEASURES)
                print(f"round {number + 1}, {arm.server} {arm.policy}: {shown}", file=sys.stderr, flush=True)
            yield found


def rows(args: argparse.Namespace) -> Iterator[Row]:
    found = list(rounds(args))
    for arm in found[0]:
        runs = [one[arm] for one in found]
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        ranges: dict[str, Any] = {f"{name}_all": [run[name] for run in runs] for name in MEASURES}
        yield {"server": arm.server, "policy": arm.policy, **medians, **ranges}


def main(arguments: Sequence[str]) -> int:
    parser = argument_parser("serving_peers", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--vllm-python", metavar="FILE", help="the Python of an environment that has vLLM")
    parser.add_argument("--front", action="store_true", help="also `kvfold serve --engine` in front of vLLM")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="of every server (%(default)s)")
    parser.add_argument("--policies", default=_POLICIES, help="of kvfold, with commas between them (%(default)s)")
    parser.add_argument("--memory", type=positive, default=2, help="GiB of KV cache (%(default)s)")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="of new documents, which every server is asked (%(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=3000,
        help="of a document; servers cache prefixes from 1,024 tokens on (%(default)s)",
    )
    parser.add_argument("--burst", type=positive, default=12, help="requests at once on a new document (%(default)s)")
    parser.add_argument("--reply", type=positive, default=16, help="tokens of each reply to a burst (%(default)s)")
    parser.add_argument("--replies", type=positive, default=16, help="replies that are decoded at once (%(default)s)")
    parser.add_argument("--short", type=positive, default=64, help="tokens of their documents (%(default)s)")
    parser.add_argument("--decode", type=positive, default=64, help="tokens of each (%(default)s)")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/serving_peers.jsonl")
    parser.add_argument("options", nargs="*", metavar="SERVE OPTIONS", help="of `kvfold serve`, behind --")
    args = parser.parse_args(arguments)
    if args.front and args.vllm_python is None:
        parser.error("--front is measured in front of vLLM; give --vllm-python /path/to/venv/bin/python")
    for policy in args.policies.split(","):
        Policy.parse(policy)
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    beside = ("save", "threads", "vllm_python", "policies", "front")
    sizes = {name: value for name, value in vars(args).items() if name not in beside}
    libraries = [] if args.vllm_python is None else [Path(path).name for path in preloaded(args.vllm_python)]
    report("serving_peers", rows(args), save=args.save, preloaded=libraries, **sizes)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    sys.exit(run_main(main, sys.argv[1:]))
