"""Does reading by parts answer questions about texts beyond the window, at which cost, and what do forks save?

    python -m benchmarks.recurse [--model smollm2-135m] [--device auto] [--lengths 16k,64k,200k] [--samples 4]
                                 [--chunk 2000] [--policies "full; snapkv + ada + 4x + int4"] [--prompts auto]
                                 [--minutes 10] [--save]

Prose with facts that resemble one another, about one in a thousand tokens; a question asks for one of them, and an
answer is right if its number is. Arms: `recursive` under each policy; `truncated`, one pass over what fits the window;
`shorten`, one pass over the `--chunk` tokens that shorten(rank) keeps; `sequential`, a map-reduce without forks: one
call at a time, nothing shared, on `--sequential` questions of each length. All arms have the same prompts
(`--prompts`: chat or plain, by the model).

A row is one question of one arm: `right`, `calls`, `seconds`, `arena_mb` (peak of KV pages in use), `memory_mb` (peak
of the process on a CPU; of the GPU beside free KV pages). All arms answer the first question of every length, then the
second, and so on: a run that ends early has rows of all of them. An arm that fails has its `error` in a row, and is
left out at that length and above. Rows `sharing`: 32 parts of a text as forks in batches (`shared_s`), and one by one
without a shared prefix (`sequential_s`); with `--samples 0` nothing else is measured.

Times are predicted from those measured before. An arm that would exceed what is left of --minutes is not run; its row
has `predicted_s` alone. The table at the end, and the length from which on recursion is right more often than a
truncated pass, are those of `python -m benchmarks.recurse_page`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import torch

import kvfold
from benchmarks.commands import argument_parser, run_main
from benchmarks.recurse_arms import Arm, run, sharing
from benchmarks.recurse_page import summary
from benchmarks.recurse_text import Question, planted
from benchmarks.rows import Row, report
from kvfold.bench.environment import device_name
from kvfold.recurse.chat_prompts import STYLES, PromptStyle, make_reading

_AROUND = 300  # tokens of prefix, question and reply, about
_SHORT_CHUNK = 400  # tokens: small models find more in short parts, and share more of a call
_SHARED_CALLS = 32


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("recurse", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory", default="4GB", help="KV-cache memory (default: %(default)s)")
    parser.add_argument("--lengths", type=_lengths, default=[16_000, 64_000, 200_000], help="tokens, e.g. 16k,200k")
    parser.add_argument("--samples", type=int, default=4, help="questions for each length (default: %(default)s)")
    parser.add_argument("--sequential", type=int, default=1, help="of those, for that arm (default: %(default)s)")
    parser.add_argument("--chunk", type=_count, default=2000, help="tokens of a part (default: %(default)s)")
    parser.add_argument("--width", type=_count, help="calls decoded together at most")
    parser.add_argument("--policies", default="full; snapkv + ada + 4x + int4", help="of the recursive arms")
    parser.add_argument("--prompts", choices=STYLES, default="auto", help="of all arms")
    parser.add_argument("--minutes", type=float, default=10.0, help="for the whole run (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/recurse.jsonl")
    args = parser.parse_args(arguments)
    # no compilation in the midst of an arm
    model = kvfold.load(args.model, device=args.device, memory=args.memory, compile=False)
    about = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"), "device": device_name(model.device),
        "model": Path(model.name).name, "window": model.spec.max_positions, "chunk": args.chunk, "memory": args.memory,
        "prompts": _style(model, args.prompts),
    }  # fmt: skip
    report("recurse", rows(model, args), save=args.save, **about)


def rows(model: kvfold.Model, args: argparse.Namespace) -> Iterator[Row]:
    """The speed, what sharing saves, then a row for each question, length and arm."""
    bench = _Bench(model, args)
    found: list[Row] = []
    for row in bench.rows():
        found.append(row)
        yield row
    table = summary(found)
    if table:
        print(f"\n{table}\n")


class _Bench:
    """One run: what is left of its time, and how fast each arm was so far."""

    def __init__(self, model: kvfold.Model, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self._until = time.monotonic() + float(60 * args.minutes)
        self._token_s: dict[Arm, float] = {}
        self._failed: dict[Arm, int] = {}  # from which length on
        recursive = [Arm("recursive", policy.strip()) for policy in args.policies.split(";")]
        self._arms = [Arm("shorten"), Arm("truncated"), *recursive]
        self._text = lru_cache(maxsize=len(args.lengths))(self._planted)

    def rows(self) -> Iterator[Row]:
        first = self._text(self.args.lengths[0], 0)
        calls = self._shared(first, self.args.chunk, 2)  # warms up, too
        single_s, batched_s = (calls[name] / calls["tokens_read"] for name in ("sequential_s", "shared_s"))
        yield {"arm": "speed", "tokens_per_s": 1 / single_s}
        yield from self._sharing(single_s + batched_s)
        if not self.args.samples:
            return
        for arm in (*self._arms, Arm("sequential")):
            self._token_s[arm] = batched_s if arm.kind == "recursive" else single_s
        if self.model.device.type == "cuda":
            for arm in self._arms:  # untimed: kernels are compiled when they first run
                self._tried({}, arm, first)
        for sample in range(self.args.samples):
            for length in self.args.lengths:
                for arm in [*self._arms, *([Arm("sequential")] if sample < self.args.sequential else [])]:
                    if length < self._failed.get(arm, length + 1):
                        yield from self._row(arm, length, sample)

    def _left_s(self) -> float:
        return self._until - time.monotonic()

    def _planted(self, length: int, sample: int) -> Question:
        return planted(length, sample, self.model.tokenizer)

    def _shared(self, asked: Question, chunk: int, count: int) -> dict[str, float]:
        return sharing(self.model, asked, chunk, self.args.width, count, self.args.prompts)

    def _sharing(self, token_s: float) -> Iterator[Row]:
        """As many parts as fit into an eighth of the time that is left, of a text that has so many."""
        for chunk in sorted({min(_SHORT_CHUNK, self.args.chunk), self.args.chunk}):
            count = min(_SHARED_CALLS, int(self._left_s() / 8 / (token_s * (chunk + _AROUND))))
            if count > 1:
                length = (count + 1) * chunk
                yield {"arm": "sharing", "part": chunk, **self._shared(self._planted(length, 0), chunk, count)}

    def _row(self, arm: Arm, length: int, sample: int) -> Iterator[Row]:
        """Nothing for a later question that no time is left for."""
        tokens = arm.num_tokens(length, self.args.chunk, self.model.spec.max_positions, _AROUND)
        predicted_s = self._token_s[arm] * tokens
        row: Row = {"arm": arm.kind, "policy": arm.policy, "tokens": length, "sample": sample}
        if predicted_s <= self._left_s():
            row = self._tried(row, arm, self._text(length, sample))
            self._token_s[arm] = row.get("seconds", predicted_s) / tokens
            if "error" in row:
                self._failed[arm] = length
            yield row
        elif sample == 0:
            yield row | {"predicted_s": predicted_s}

    def _tried(self, row: Row, arm: Arm, asked: Question) -> Row:
        """The row with what the arm did, or with its error: one that fails must not lose the others."""
        try:
            return row | run(self.model, arm, asked, self.args.chunk, self.args.width, self.args.prompts).as_row()
        except Exception as error:
            return row | {"error": f"{type(error).__name__}: {error}"[:300]}
        finally:
            gc.collect()
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()


def _style(model: kvfold.Model, asked: PromptStyle) -> str:
    """Which prompts "auto" means."""
    chat = make_reading(model, asked, "?", "", 1).template is not None
    return asked if asked != "auto" else "chat" if chat else "plain"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no whole number from 1 on')
    return int(text)


def _lengths(text: str) -> list[int]:
    """16k,200000"""
    try:
        found = [int(part[:-1]) * 1000 if part.endswith("k") else int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no list of lengths; write for example 16k,200k')
    return sorted(set(found))


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
