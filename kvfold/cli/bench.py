"""`kvfold bench`: policies compared at equal bytes, on tasks with a right answer, with intervals."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvfold.bench.suites import SUITES
from kvfold.cli import bench_table
from kvfold.cli.options import Subparsers, add_model_options, add_option, count, load_model, seed, split_policies
from kvfold.errors import DOCS_URL
from kvfold.text_io import read_text_file

if TYPE_CHECKING:
    from kvfold.bench.configure import BenchConfig

REPORT = "report.html"
INTERRUPTED = 130
_SUITES = "\n".join(f"  {suite.name:10} {suite.summary}" for suite in SUITES.values())
_EPILOG = f"""suites:
{_SUITES}

examples:
  kvfold bench                                     the quick suite: a small model on a CPU, in minutes
  kvfold bench --list                              list the workloads
  kvfold bench --workloads passkey,ruler:vt --policies "snapkv + ada, int4" --memory 50%,25% --samples 20
  kvfold bench --suite standard --model qwen2.5-coder-1.5b --lengths 4k,8k --device cuda --shard 0/12
  kvfold bench --suite tight --also "keydiff + int4, tova + ada" --device cuda

An interrupted run is resumed by the same command. {DOCS_URL}/benchmark.md
explains what is matched and measured.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="benchmark policies at equal KV-cache bytes",
        description="Run every policy at every memory budget on samples of every workload, question-aware (known) and "
        "question-agnostic (unknown); print a table and write a report.",
        epilog=_EPILOG,
    )
    parser.add_argument("--list", action="store_true", help="list the workloads and exit")
    _add_choices(parser)
    share = parser.add_mutually_exclusive_group()
    share.add_argument("--shard", default="0/1", metavar="I/N", help="run shard I of N, one per process")
    add_option(share, "--find-sizes", "I/N", "only search byte-matched sizes, for shard I of N policies, and exit")
    add_option(parser, "--sizes", "FILE", "reuse the sizes.json of another run", Path)
    add_option(parser, "--out", "DIR", "output folder (default: runs/MODEL-SUITE-HASH)", Path)
    add_model_options(parser, memory="--arena")
    parser.set_defaults(run=run)


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """What is run."""
    parser.add_argument("--suite", default="quick", help=f"{', '.join(SUITES)} (default: quick)")
    add_option(parser, "--workloads", "A,B:TASK", "workloads, or single tasks (WORKLOAD:TASK)")
    add_option(
        parser,
        "--policies",
        "A, B",
        'without sizes, e.g. "snapkv + ada, int4"; full is always included',
        split_policies,
    )
    parser.add_argument(
        "--also", default=[], type=split_policies, metavar="A, B", help="policies in addition to the suite's"
    )
    parser.add_argument(
        "--memory",
        dest="memories",
        metavar="P%,P%",
        help="budgets in percent of the full cache's bytes; own: policies with their own size",
    )
    add_option(parser, "--lengths", "N,N", "prompt lengths in tokens, e.g. 1000,4k")
    add_option(parser, "--samples", "N", "samples per task", count)
    parser.add_argument("--modes", help="known (question-aware), unknown (question-agnostic), or known,unknown")
    add_option(parser, "--seed", "N", "seed of the samples", seed, 0)
    add_option(parser, "--fidelity", "N", "samples per task whose KL to the full cache is measured", count)
    add_option(parser, "--diagnostics", "N", "samples per task with decode-step time and kept slots", count)
    add_option(parser, "--haystack", "FILE", "filler text for needles (default: generated prose)", Path)
    parser.add_argument("--data", action="append", default=[], metavar="W.OPTION=FILE", help="input file of workload W")


def run(args: argparse.Namespace) -> int:
    """Run what is missing, then print the table. Options are checked before the model is loaded."""
    if args.list:
        bench_table.print_workloads()
        return 0
    from kvfold.bench.configure import default_folder  # here: --help must not import torch
    from kvfold.bench.plan import Shard
    from kvfold.bench.suite import Bench

    finds = None if args.find_sizes is None else Shard.parse(args.find_sizes)
    wanted = wanted_of(args)
    filler = wanted.filler[0]
    if args.sizes is not None:
        read_text_file(args.sizes)
    model = load_model(args)
    command = shlex.join(["kvfold", *sys.argv[1:]])
    about = wanted.describe(model, command)
    folder = args.out or default_folder(about)
    bench = Bench(model, about, wanted.tasks, folder, filler, args.sizes)
    print(f"{len(bench.batches)} batches in {folder}", file=sys.stderr)
    try:
        if finds is None:
            bench.run()
        else:
            bench.find_sizes(finds)
    except KeyboardInterrupt:
        print(f"interrupted; {command} resumes from {folder}", file=sys.stderr)
        return INTERRUPTED
    if bench.batches and finds is None:  # a shard may have none
        _tell(folder)
    return 0


def _tell(folder: Path) -> None:
    from kvfold.bench.record import read_run
    from kvfold.bench.report import write_report

    bench_table.print_run(read_run(folder))
    write_report([folder], folder / REPORT)
    print(f"\nrows and {REPORT} are in {folder}")


def wanted_of(args: argparse.Namespace) -> BenchConfig:
    from kvfold.bench.configure import BenchConfig, parse_length
    from kvfold.bench.plan import Shard, workload_options

    return BenchConfig(
        suite=args.suite,
        workloads=_split(args.workloads),
        policies=args.policies,
        also=args.also,
        memories=_split(args.memories),
        lengths=None if args.lengths is None else [parse_length(text) for text in args.lengths.split(",")],
        samples=args.samples,
        modes=cast(Any, _split(args.modes)),  # checked there
        seed=args.seed,
        fidelity=args.fidelity,
        diagnostics=args.diagnostics,
        haystack=args.haystack,
        options=workload_options(args.data),
        shard=Shard.parse(args.shard),
    )


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]
