"""How fast are teacher labels under a policy, and how far from those of the full cache, at equal memory?

    python -m benchmarks.labels [--model smollm2-135m] [--text FILE] [--window 4096] [--context 3072] [--save]

A text is cut into windows. All of a window's context but its last token is cached under a policy; that token and those
behind it are labelled in one pass over the cache. Every arm has the same arena, of a size that holds --full-contexts
contexts of the full cache, and holds as many windows at once as fit: `held`. Sizes are bytes: 25%mem is a quarter of
the full cache's. `one pass` is `full` without any cache: contexts are fed again with the labelled tokens.

`labels_per_s`: labels over all seconds. `cached_per_s`: over the seconds of labelling alone, as if contexts were cached
already. `kl_nats`: KL(full || policy) per label over the shared tokens of both top-k lists and the rest (a lower
bound). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import kvfold
from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import Row, report
from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.kv_bounds import KVBounds
from kvfold.errors import InputError
from kvfold.models.attach import set_arena
from kvfold.pages.arena import Arena
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.text_io import read_text_file
from kvfold.train.label_batches import LabelBatches
from kvfold.train.label_compare import compare_rows
from kvfold.train.label_pass import LabelInput, Labeller
from kvfold.train.label_rows import Rows, joined
from kvfold.train.label_windows import WindowPlan
from kvfold.train.labels import LabelRun

ONE_PASS = "one pass"
SIZES = ("25%mem", "12.5%mem")
POLICIES = ("streaming", "keydiff + global + int4", "snapkv + global + int4", "kvzip + global + int4")
ARMS = (ONE_PASS, "full", *(f"{policy} + {size}" for size in SIZES for policy in POLICIES))


class TimedLabeller(Labeller):
    """Counts the seconds of labelling alone."""

    label_s = 0.0

    def label(self, windows: Sequence[LabelInput], caches: Sequence[SequenceCache]) -> Rows:
        self._wait()
        began = time.perf_counter()
        found = super().label(windows, caches)
        self._wait()
        self.label_s += time.perf_counter() - began
        return found

    def _wait(self) -> None:
        if self.runner.arena.device.type == "cuda":
            torch.cuda.synchronize()


def source_text(path: Path | None) -> str:
    """A text file, or the field "context" of every row of a .jsonl file; without a path, the example text."""
    if path is None:
        return kvfold.example_text()
    text = read_text_file(path)
    if path.suffix != ".jsonl":
        return text
    return "\n\n".join(str(json.loads(line)["context"]) for line in text.splitlines())


def measure(
    model: kvfold.Model, run: LabelRun, arm: str, args: argparse.Namespace, full: Rows | None
) -> tuple[Row, Rows]:
    """One arm after a warm-up of one window."""
    labeller = TimedLabeller(model, Policy.parse("full" if arm == ONE_PASS else arm), args.topk)
    inputs = run.inputs(caches=arm != ONE_PASS)[: args.windows]
    labeller.check_context(len(inputs[0].cached))
    for _ in LabelBatches(labeller, inputs[:1]):
        pass
    labeller.label_s = 0.0
    began = time.perf_counter()
    batches = list(LabelBatches(labeller, inputs, None if arm == ONE_PASS else args.batch))
    seconds = time.perf_counter() - began
    rows = joined([batch.rows for batch in batches])
    count, held = len(rows.position_N), max(batch.num_windows for batch in batches)
    found: Row = {
        "arm": arm,
        "labels": count,
        "held": held,
        "cache_bytes": sum(batch.cache_bytes for batch in batches) // len(inputs),
        "seconds": seconds,
        "labels_per_s": count / seconds,
        "cached_per_s": None if arm == ONE_PASS else count / labeller.label_s,
    }
    if full is not None:
        compared = compare_rows(full, rows)
        found |= {"kl_nats": compared.kl_nats, "agreement": compared.agreement, "nats_lost": compared.nats_lost}
    return found, rows


def rows(model: kvfold.Model, args: argparse.Namespace) -> Iterator[Row]:
    plan = WindowPlan.of(model.spec.max_positions, args.window, args.context)
    runner = Runner(model.hf, model.spec, model.arena)
    num_bytes = args.full_contexts * KVBounds(runner, Policy.parse("full")).kv_bytes(plan.context)
    model.memory_bytes = None
    set_arena(model.hf, Arena(num_bytes, device=model.device, superblock_bytes=runner.arena.superblock_bytes))
    most_chars = 16 * (plan.context + args.windows * (plan.window - plan.context))
    run = LabelRun(model, [source_text(args.text)[:most_chars]], "full", args.topk, plan)
    if not run.inputs(caches=True):
        raise InputError(f"the text has no token behind a context of {plan.context}; give a longer one with --text")
    full = None
    for arm in args.arms or ARMS:
        if args.seconds is not None and time.perf_counter() - args.began > args.seconds:
            return
        row, labelled = measure(model, run, arm, args, full)
        full = labelled if full is None else full
        yield {**row, "arena_bytes": num_bytes}


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("labels", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, help="text file, or .jsonl with a field context (default: the example)")
    parser.add_argument("--window", type=int, default=4096, help="tokens (default: %(default)s)")
    parser.add_argument("--context", type=int, default=3072, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=32, help="to label (default: %(default)s)")
    parser.add_argument("--full-contexts", type=int, default=4, help="that the arena holds (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="windows held at most (default: %(default)s)")
    parser.add_argument("--topk", type=int, default=20, help="labels of a token (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", help="policies instead of all; the first is what others are compared with")
    parser.add_argument("--seconds", type=float, help="begin no arm after so many seconds")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/labels.jsonl")
    args = parser.parse_args(arguments)
    args.began = time.perf_counter()
    model = kvfold.load(args.model, device=args.device, dtype=args.dtype, memory="64MB")  # until its size is known
    about = {"model": args.model, "window": args.window, "context": args.context, "topk": args.topk}
    report("labels", rows(model, args), save=args.save, text=args.text.name if args.text else "example", **about)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
