"""Does reading by parts answer questions about texts beyond the window, at which cost, and what do forks save?

    python -m benchmarks.recurse [--model smollm2-135m] [--device auto] [--lengths 16k,64k,200k] [--samples 4]
                                 [--chunk 2000] [--policies "full; snapkv + ada + 4x + int4"] [--minutes 10] [--save]

Prose with facts that resemble one another, about one in a thousand tokens; a question asks for one of them, and an
answer is right if its number is. Arms: `recursive` under each policy; `truncated`, one pass over what fits the window;
`shorten`, one pass over the `--chunk` tokens that shorten(rank) keeps; `sequential`, a map-reduce without forks: one
call at a time, nothing shared. `right` is the mean with its 95 % bootstrap interval. `arena_mb`: peak of KV pages in
use; `memory_mb`: peak of the process (CPU), or of the GPU beside free KV pages.

Row `sharing`: the first parts of the first text as forks in batches (`shared_s`), and one by one (`sequential_s`).

One call is timed first, and every arm's time is predicted from it. An arm that would exceed what is left of --minutes
is not run; its row has `predicted_s` alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import kvfold
from benchmarks.commands import argument_parser, run_main
from benchmarks.recurse_arms import Arm, Outcome, run, sharing
from benchmarks.recurse_text import Question, planted
from benchmarks.rows import Row, report
from kvfold.bench.statistics import mean_interval
from kvfold.recurse.context import Context
from kvfold.recurse.reader import Reader

_AROUND = 300  # tokens of prefix, question and reply, about


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("recurse", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory", default="4GB", help="KV-cache memory (default: %(default)s)")
    parser.add_argument("--lengths", type=_lengths, default=[16_000, 64_000, 200_000], help="tokens, e.g. 16k,200k")
    parser.add_argument("--samples", type=int, default=4, help="questions for each length (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=2000, help="tokens of a part (default: %(default)s)")
    parser.add_argument("--width", type=int, help="calls decoded together at most")
    parser.add_argument("--policies", default="full; snapkv + ada + 4x + int4", help="of the recursive arms")
    parser.add_argument("--minutes", type=float, default=10.0, help="for the whole run (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/recurse.jsonl")
    args = parser.parse_args(arguments)
    model = kvfold.load(
        args.model, device=args.device, memory=args.memory, compile=False
    )  # no compilation in the midst of an arm
    about = {"model": args.model, "chunk": args.chunk, "memory": args.memory}
    report("recurse", rows(model, args), save=args.save, **about)


def rows(model: kvfold.Model, args: argparse.Namespace) -> Iterator[Row]:
    """The speed, what sharing saves, then a row for each length and arm."""
    until = time.monotonic() + 60 * args.minutes
    texts = {length: [planted(length, i, model.tokenizer) for i in range(args.samples)] for length in args.lengths}
    first = texts[args.lengths[0]][0]
    token_s = _token_s(model, first, args.chunk)
    yield {"arm": "speed", "tokens_per_s": 1 / token_s}
    count = _affordable(until, token_s * (2 * args.chunk + _AROUND), 16)
    if count:
        yield {"arm": "sharing", "tokens": args.lengths[0], **sharing(model, first, args.chunk, args.width, count)}
    arms = [Arm("shorten"), *(Arm("recursive", policy.strip()) for policy in args.policies.split(";"))]
    arms += [Arm("sequential"), Arm("truncated")]
    for length in args.lengths:
        for arm in arms:
            tokens = arm.num_tokens(length, args.chunk, model.spec.max_positions, _AROUND)
            predicted_s = token_s * tokens * args.samples
            row: Row = {"arm": arm.kind, "policy": arm.policy, "tokens": length, "predicted_s": predicted_s}
            if predicted_s <= until - time.monotonic():
                found = [run(model, arm, asked, args.chunk, args.width) for asked in texts[length]]
                row |= _summary(found)
            yield row


def _affordable(until: float, call_s: float, most: int) -> int:
    """How many calls fit into a quarter of the time that is left."""
    return min(most, int((until - time.monotonic()) / 4 / call_s))


def _token_s(model: kvfold.Model, asked: Question, chunk: int) -> float:
    """Seconds of a token of one call, after one to warm up."""
    text = asked.text[: 8 * chunk]
    with Reader(model, Context(text), asked.question, chunk=chunk, width=1) as reader:
        prompts = [reader.reading.prompt(piece.text) for piece in reader.pieces[:1]]
        for _ in range(2):
            began = time.perf_counter()
            reader.calls.ask_batch(prompts)
            seconds = time.perf_counter() - began
        return seconds / reader.calls.num_tokens(prompts[0])


def _summary(found: Sequence[Outcome]) -> Row:
    scores = [float(one.is_right) for one in found]
    interval = mean_interval(scores) if len(scores) > 1 else None
    return {
        "right": sum(scores) / len(scores),
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "samples": len(found),
        "calls": sum(one.calls for one in found) / len(found),
        "seconds": sum(one.seconds for one in found) / len(found),
        "arena_mb": max(one.peaks.arena for one in found) / 1e6,
        "memory_mb": max(one.peaks.memory for one in found) / 1e6,
        "ratio": _mean_ratio(found),
        "dropped": sum(one.result.num_dropped for one in found) / len(found),
    }


def _mean_ratio(found: Sequence[Outcome]) -> float:
    """Bytes of full caches by those that were resident, over all calls."""
    usages = [one.result.usage for one in found]
    return sum(usage.full_bytes for usage in usages) / max(1, sum(usage.resident_bytes for usage in usages))


def _lengths(text: str) -> list[int]:
    """16k,200000"""
    try:
        found = [int(part[:-1]) * 1000 if part.endswith("k") else int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no list of lengths; write for example 16k,200k')
    return found


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
