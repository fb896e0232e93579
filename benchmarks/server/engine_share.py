"""How much of the engine's own tokens per second does the HTTP server deliver at the same batch?

    python -m benchmarks.server engine_share [--model qwen2.5-coder-1.5b] [--clients 8 64 256] [--prompt 64]
                                             [--reply 256] [--policy full] [--memory SIZE] [--rounds 2]
                                             [--random-model tiny | 1.5b] [--save]

One process loads the model once. `engine` prefills N prompts in one call and runs `kvfold.engine.generate.generate`
over them, greedy, to equal lengths. `stream` and `whole` (not streamed) send the same number of other prompts of the
same length to a server in this process at once, from another process over plain sockets; as many requests can run.
Every way runs `--rounds` times; the first warms up (kernels, graphs), the fastest of the others counts. End-of-text
tokens are ignored.

    tokens_per_s         reply tokens over all seconds, prefill included, from the sending to the last byte
    share                of that of the engine; above 1 where the two runs differ by more than the server costs
    decode_tokens_per_s  while all N sequences decode; of streams counted by the text that arrived
    decode_share         of that of the engine
    gap_ms_p50, _p99     between two events of a stream: inter-token latency
    texts_per_token      events with text over tokens: below 1 where an event carries several tokens
    first_s_p50          time to first token of streams
    cpu_s                processor seconds of the process of engine and server
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.commands import argument_parser, positive
from benchmarks.rows import ROOT, Row, percentile, report
from benchmarks.server.client import filler
from benchmarks.server.replicas import SHAPES, random_model
from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model, load
from kvfold.policy.policy import Policy
from kvfold.serve.batch_send import prepare
from kvfold.serve.garbage import rare_collections
from kvfold.serve.server import Server, open_store, service_of
from kvfold.serve.settings import Limits, Settings

_TIMEOUT_S = 600.0
_NAME = "served"
_round = count()  # prompts of two rounds share no prefix


def prompts(model: Model, num_prompts: int, length: int) -> list[str]:
    """Texts of so many tokens each, different from the first word on."""
    found, first = [], next(_round)
    for i in range(num_prompts):
        ids = model.tokenizer(f"{first}.{i} {filler()}")["input_ids"]
        ids = ids * (1 + length // len(ids))
        found.append(_text_of(model.tokenizer, ids, length))
    return found


def _text_of(tokenizer: Any, ids: list[int], length: int) -> str:
    """The beginning of a text that is so many tokens when it is tokenized again, or next to it."""
    for end in range(length, length + 8):
        text = str(tokenizer.decode(ids[:end]))
        if len(tokenizer(text)["input_ids"]) >= length:
            return text
    return text


def engine_loop(model: Model, policy: Policy, texts: Sequence[str], reply: int) -> Row:
    """Prefill in one call, then decode to the end; garbage is collected as seldom as in the server."""
    runner = Runner(model.hf, model.spec, model.arena, compile=model.compile)
    tokens = [model.tokenizer(text)["input_ids"] for text in texts]
    sequences = [runner.new_sequence(policy) for _ in texts]
    began = time.perf_counter()
    logits_BV = runner.prefill(sequences, tokens)
    requests = [Request(s, row_V, reply) for s, row_V in zip(sequences, logits_BV, strict=True)]
    logits_BV.sum().item()  # waits for the device
    prefilled = time.perf_counter()
    for _ in generate(runner, requests, model.tokenizer):
        pass
    ended = time.perf_counter()
    for sequence in sequences:
        sequence.release()
    num_tokens = sum(len(request.token_ids) for request in requests)
    assert num_tokens == reply * len(texts)
    return {
        "seconds": ended - began,
        "tokens_per_s": num_tokens / (ended - began),
        "decode_tokens_per_s": num_tokens / (ended - prefilled),
        "prefill_s": prefilled - began,
    }


def served_load(port: int, texts: Sequence[str], reply: int, *, is_streamed: bool) -> Row:
    """All requests at once, from a process of its own."""
    asked = {"model": _NAME, "max_tokens": reply, "temperature": 0, "stream": is_streamed}
    job = {"port": port, "path": "/v1/completions", "timeout_s": _TIMEOUT_S}
    job["bodies"] = [{**asked, "prompt": text} for text in texts]
    command = [sys.executable, "-m", "benchmarks.server.stream_clients"]
    done = subprocess.run(command, input=json.dumps(job), cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found = json.loads(done.stdout)
    if found["failed"]:
        raise SystemExit(f"{len(found['failed'])} requests failed: {found['failed'][0]}")
    for usage in found.get("usage", []):
        assert usage["completion_tokens"] == reply
    row = {"seconds": found["seconds"], "tokens_per_s": len(texts) * reply / found["seconds"]}
    return {**row, **stream_figures(found["streams"], reply)} if is_streamed else row


def stream_figures(streams: Sequence[Sequence[tuple[float, int]]], reply: int) -> Row:
    """Of (seconds, characters) of each event of each stream; a stream's tokens are spread evenly over its text. Streams
    of random weights may have one event, or no text at all."""
    num_tokens, streams = reply * len(streams), [events for events in streams if events]
    gaps = [b[0] - a[0] for events in streams for a, b in pairwise(events)]
    if not gaps:
        return {"texts_per_token": sum(map(len, streams)) / num_tokens}
    begin, end = max(events[0][0] for events in streams), min(events[-1][0] for events in streams)
    decoded = 0.0
    for events in streams:
        inside = sum(length for at, length in events if begin < at <= end)
        decoded += reply * inside / sum(length for _, length in events)
    return {
        "decode_tokens_per_s": decoded / (end - begin) if end > begin else None,
        "first_s_p50": percentile([events[0][0] for events in streams], 50),
        "gap_ms_p50": 1e3 * percentile(gaps, 50),
        "gap_ms_p99": 1e3 * percentile(gaps, 99),
        "texts_per_token": sum(map(len, streams)) / num_tokens,
    }


@contextmanager
def server_of(model: Model, policy: Policy, most: int) -> Iterator[int]:
    """The port of a server that runs in a thread."""
    prepare()
    settings = Settings((_NAME,), Limits(running=most, waiting=most), temperature=0.0)
    with service_of(model, policy, settings, open_store(model, host_bytes=1 << 30)) as service:
        service.warm_up()  # as `kvfold serve` does
        server = Server(service, lambda trace: None)
        thread = Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def fastest(measure: Callable[[], Row], rounds: int) -> Row:
    """Of the rounds after the first; processor seconds are those of its round."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        found.append({**measure(), "cpu_s": time.process_time() - began})
    return max(found[1:], key=lambda row: float(row["tokens_per_s"]))


def several(text: str) -> int:
    """The type of `--rounds`."""
    if (number := positive(text)) < 2:
        raise argparse.ArgumentTypeError("the first round only warms up; give at least 2")
    return number


def shares(args: argparse.Namespace, model: Model) -> Iterator[Row]:
    policy = Policy.parse(args.policy)
    model.spec = replace(model.spec, eos_token_ids=frozenset())

    def texts(num_prompts: int) -> list[str]:
        return prompts(model, num_prompts, args.prompt)

    engine: dict[int, Row] = {}
    gc.collect()
    for clients in args.clients:
        with rare_collections():
            found = fastest(lambda n=clients: engine_loop(model, policy, texts(n), args.reply), args.rounds)  # type: ignore[misc]
        engine[clients] = found
        yield {"way": "engine", "clients": clients, **found}
    with server_of(model, policy, max(args.clients)) as port:
        for clients in args.clients:
            for is_streamed in (True, False):

                def measure(n: int = clients, is_streamed: bool = is_streamed) -> Row:
                    return served_load(port, texts(n), args.reply, is_streamed=is_streamed)

                found, own = fastest(measure, args.rounds), engine[clients]
                row = {"way": "stream" if is_streamed else "whole", "clients": clients, **found}
                row["share"] = found["tokens_per_s"] / own["tokens_per_s"]
                if found.get("decode_tokens_per_s") is not None:
                    row["decode_share"] = found["decode_tokens_per_s"] / own["decode_tokens_per_s"]
                yield row


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("server engine_share", __doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="default: %(default)s")
    parser.add_argument("--random-model", choices=list(SHAPES), help="random weights of this shape instead of --model")
    parser.add_argument("--policy", default="full", help="of engine and server; default: %(default)s")
    parser.add_argument("--memory", help="of the arena, e.g. 8GB; default: as kvfold serve")
    parser.add_argument(
        "--clients", type=positive, nargs="+", default=[8, 64, 256], help="requests at once; default: 8 64 256"
    )
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a prompt; default: %(default)s")
    parser.add_argument("--reply", type=positive, default=256, help="tokens of a reply; default: %(default)s")
    parser.add_argument("--rounds", type=several, default=2, help="the first warms up; default: %(default)s")
    parser.add_argument("--save", action="store_true", help="append the rows to benchmarks/results/engine_share.jsonl")
    args = parser.parse_args(arguments)
    Policy.parse(args.policy)
    about = {key: value for key, value in vars(args).items() if key not in ("save", "clients")}
    if args.random_model:
        about["model"] = None
    with tempfile.TemporaryDirectory() as folder:
        name = args.model
        if args.random_model:
            name = str(random_model(Path(folder), args.random_model))
        model = load(name, memory=args.memory, compile=False, progress=False)
        report("engine_share", shares(args, model), save=args.save, **about)
