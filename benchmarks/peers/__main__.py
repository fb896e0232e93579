"""Do kvfold's methods do what their namesakes in other libraries do, on the same prompts at the same number of slots?

    sh benchmarks/peers/environment.sh ENV                              once: the peers' environment
    python -m benchmarks.peers jobs WORK --model smollm2-135m           prompts and settings
    ENV/bin/python benchmarks/peers/answer.py WORK                      kvpress, transformers' quantised caches
    python -m benchmarks.peers answer WORK                              kvfold
    python -m benchmarks.peers collect WORK --out RUNS                  RUNS/kvfold and RUNS/peer, for `kvfold report`
    python -m benchmarks.peers compare RUNS                             a table on standard output
    python -m benchmarks.peers docs RUNS                                the table of docs/research/peers.md
    python -m benchmarks.peers natural RUNS                             docs/natural_questions.svg and its table

All of them go on where they stopped. The exit code is 0 when all is done, 3 when the time limit came first.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.commands import argument_parser, run_main
from benchmarks.peers.collect import collect
from benchmarks.peers.compare import PAGE, compare, write_docs
from benchmarks.peers.exchange import FORMAT, Header, write_jobs
from benchmarks.peers.methods import FULL, NATURAL, PRESSES, QUANTIZED
from benchmarks.peers.natural import draw, table
from benchmarks.peers.ours import answer_all
from benchmarks.peers.prompts import Samples, end_tokens
from kvfold.bench.environment import commit
from kvfold.bench.record import MODES
from kvfold.models.pull.pull import resolve

OUT_OF_TIME = 3
METHODS = {"presses": (FULL, *PRESSES), "quantized": (FULL, *QUANTIZED), "natural": (replace(FULL, ours=""), *NATURAL)}
TASKS = ("needle:needles_1", "passkey:passkey", "needle:needles_3")


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    if options.what == "jobs":
        return write_prompts(options)
    if options.what == "answer":
        return 0 if answer_all(options.folder, options.limit_s) else OUT_OF_TIME
    if options.what == "collect":
        return collect(options.folder, options.out)
    if options.what == "natural":
        draw(options.folder, PAGE.parents[1] / "natural_questions.svg")
        print(write_docs(options.folder, table))
    else:
        print(compare(options.folder) if options.what == "compare" else write_docs(options.folder, compare))
    return 0


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("peers", __doc__)
    parser.add_argument("what", choices=("jobs", "answer", "collect", "compare", "docs", "natural"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="catalogue name or folder (default: smollm2-135m)")
    parser.add_argument("--dtype", default="float32", help="of weights, attention and cache (default: float32)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--length", type=int, default=1000, help="tokens of a prompt (default: 1000)")
    parser.add_argument("--samples", type=int, default=15, help="of each task (default: 15)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="WORKLOAD:TASK")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--data", action="append", default=[], metavar="W.OPTION=FILE", help="input file of workload W")
    parser.add_argument("--methods", default="presses", choices=tuple(METHODS), help="of jobs (default: presses)")
    parser.add_argument("--ratios", nargs="+", type=int, default=[2, 4, 8], help="default: 2 4 8")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="of collect (default: runs/peers)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="of answer: begin no prompt after this")
    return parser.parse_args(arguments)


def write_prompts(options: argparse.Namespace) -> int:
    header = requested(options)
    samples = Samples(header)
    prompts = [samples.prompt(*sample) for sample in samples]
    write_jobs(options.folder, header, prompts)
    print(f"{len(prompts)} prompts, {len(header.lanes())} caches each, {len(header.modes)} modes")
    return 0


def requested(options: argparse.Namespace) -> Header:
    folder = str(resolve(options.model))
    return Header(
        FORMAT,
        shlex.join(["python", "-m", "benchmarks.peers", "jobs", "WORK", *sys.argv[3:]]),
        commit(),
        options.model,
        folder,
        options.dtype,
        options.device,
        end_tokens(folder),
        options.length,
        options.seed,
        options.samples,
        tuple(options.tasks),
        tuple(options.modes),
        tuple(options.ratios),
        METHODS[options.methods],
        tuple(options.data),
    )


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
