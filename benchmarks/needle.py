"""How much of what stands in a prompt survives each policy, with the question known and unknown?

    python benchmarks/needle.py --model smollm2-135m --tokens 1000         run; go on where the file of rows ends
    python benchmarks/needle.py --model smollm2-135m --shard 0/4           every fourth prompt: one of four processes
    python benchmarks/needle.py --model smollm2-135m --plan few            other policies and sizes: bench/plans.py
    python benchmarks/needle.py --table ROWS.jsonl [ROWS.jsonl …]          the table of a run, or of all its shards
    python benchmarks/needle.py --condense ROWS.jsonl [ROWS.jsonl …]       keep a run under benchmarks/results/
    python benchmarks/needle.py --docs                                     rewrite docs/needle.md from what is kept

Runs print their table on standard output, then one line of JSON; progress goes to standard error. The exit code is 0
when all prompts are done, 3 when the time limit came first, 130 after Ctrl-C, 1 on an error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from dataclasses import asdict, astuple, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs where kvfold is not installed

from benchmarks.rows import commit
from kvfold.bench.haystack import Haystack, from_text, prose, read_text
from kvfold.bench.needle import Needles
from kvfold.bench.plans import PLANS, find_plan
from kvfold.bench.rows import MODES, OWN_POLICIES, OWN_PROSE, Cell, Facts, RowFile, read_cells, to_json
from kvfold.bench.shard import Shard
from kvfold.bench.sweep import Sweep, jobs, run_all
from kvfold.bench.table import Result, caption, heading, results, table, with_sections
from kvfold.errors import KvfoldError
from kvfold.models.loader import DTYPES, Model, load

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "needle.md"
OUT_OF_TIME, INTERRUPTED = 3, 130


def main() -> int:
    began = time.monotonic()
    options = parse_options()
    try:
        if options.docs:
            return write_page()
        if options.condense:
            return keep(options.condense)
        if options.table:
            return show(read_cells(*options.table))
        return run(options, began)
    except KvfoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="catalogue name or folder of a model to run")
    files: dict[str, Any] = {"type": Path, "nargs": "+", "metavar": "ROWS"}
    what.add_argument("--table", **files, help="print the table of files of rows or results")
    what.add_argument("--condense", **files, help="write a run's results to benchmarks/results/")
    what.add_argument("--docs", action="store_true", help="rewrite docs/needle.md from benchmarks/results/")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of weights and cache (default: auto)")
    parser.add_argument("--memory", metavar="BYTES", help="of the arena, e.g. 2GB (default: most of what is free)")
    parser.add_argument("--compile", action="store_true", help="compile decode steps on a GPU (default: capture them)")
    parser.add_argument("--plan", default=OWN_POLICIES, help=f"{', '.join(PLANS)} (default: %(default)s); it says what")
    parser.add_argument("--tokens", type=int, help="a prompt is long (scorers: 1000)")
    parser.add_argument("--samples", type=int, help="how many prompts there are, taking turns over tasks (100)")
    parser.add_argument("--policy", action="append", help="which policies, without sizes; repeat")
    parser.add_argument("--also", action="append", default=[], metavar="POLICY", help="and one more; repeat")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="at which sizes (2x 4x 8x)")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="with the question known or not (both)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="only prompts whose index modulo N is I")
    parser.add_argument(
        "--haystack", type=Path, metavar="FILE", help="text, or JSON of essays, to hide needles in (default: own prose)"
    )
    parser.add_argument("--out", type=Path, metavar="ROWS", help="file of rows (default: named by model and shard)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), metavar="S", help="end before so many seconds")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    return parser.parse_args()


def fill_in(options: argparse.Namespace) -> None:
    """What was not said, from the plan."""
    plan = find_plan(options.plan)
    for name in ("tokens", "samples", "sizes", "modes"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(plan, name))
    options.policy = [*(options.policy or plan.policies()), *options.also]


def run(options: argparse.Namespace, began: float) -> int:
    fill_in(options)
    todo = jobs(options.policy, options.sizes, options.modes)  # a bad expression is told before minutes of loading
    shard = Shard.parse(options.shard)
    haystack, haystack_name = read_haystack(options.haystack)
    model = load(
        options.model, device=options.device, dtype=options.dtype, memory=options.memory, compile=options.compile
    )
    facts = gather_facts(options, model, haystack_name)
    path = options.out or default_path(facts, shard)
    file = RowFile(path, facts)
    needles = Needles(model.tokenizer, options.tokens, options.seed, haystack)
    try:
        deadline = began + options.limit_s
        is_done = run_all(Sweep(model, facts, todo), needles, file, options.samples, deadline, shard)
        code = 0 if is_done else OUT_OF_TIME
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code:
        print(f"not all prompts are done; the same command goes on from {path}", file=sys.stderr)
    return show(read_cells(path)) or code if file.done else code


def default_path(facts: Facts, shard: Shard) -> Path:
    """Processes that share a run must not share a file."""
    plan = "" if facts.plan == OWN_POLICIES else f"_{facts.plan}"
    part = f".{shard.index}of{shard.num_shards}" if shard.num_shards > 1 else ""
    return Path(f"needle_{facts.model}{plan}.rows{part}.jsonl")


def read_haystack(path: Path | None) -> tuple[Haystack, str]:
    """The sentences, and a name for them that changes with the text."""
    if path is None:
        return prose, OWN_PROSE
    text = read_text(path)
    return from_text(text), f"{path.name} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def gather_facts(options: argparse.Namespace, model: Model, haystack: str) -> Facts:
    is_cuda = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if is_cuda else f"{platform.machine()} CPU"
    return Facts(
        model=Path(options.model).name,
        tokens=options.tokens,
        seed=options.seed,
        haystack=haystack,
        dtype=str(model.spec.dtype).removeprefix("torch."),
        device=device,
        commit=options.commit or commit(),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        plan=options.plan,
    )


def show(cells: list[Cell]) -> int:
    print(caption(cells), table(cells), sep="\n\n")
    columns = [column.name for column in fields(Result)]
    values = [[_rounded(value) for value in astuple(result)] for result in results(cells)]
    print(json.dumps({**asdict(cells[0].facts), "columns": columns, "results": values}))
    return 0


def _rounded(value: object) -> object:
    return round(value, 1) if isinstance(value, float) else value


def keep(rows: list[Path]) -> int:
    """One file per model, haystack and plan."""
    cells = read_cells(*rows)
    path = RESULTS / f"needle_{heading(cells[0].facts).replace(', ', '_').replace(' ', '_')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(to_json(cell) + "\n" for cell in cells), encoding="utf-8")
    print(f"{len(cells)} results in {path.relative_to(ROOT)}")
    return 0


def write_page() -> int:
    paths = sorted(RESULTS.glob("needle_*.jsonl"))
    PAGE.write_text(with_sections(PAGE.read_text(encoding="utf-8"), paths), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written from {len(paths)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
