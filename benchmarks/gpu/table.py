"""The whole table of GPU numbers in one run: what was to be reached, what was, and what others reach.

    python -m benchmarks.gpu table [--parts attention,step,prefill,capacity,lookup,peers,sweep] [--site FOLDER]
                                   [--lookup-model qwen2.5-coder-1.5b] [--limit-s 580] [--logs FOLDER]
    python -m benchmarks.gpu table --table      the table of the last run of every part
    python -m benchmarks.gpu table --docs       rewrite docs/research/gpu.md from these, and draw docs/research/gpu.svg

Every part is a process of its own with a time limit, so that its memory is free for the next; one that fails or runs
out of time says so and the rest goes on. Rows are appended to benchmarks/results/ as they come, so what a part had
measured before stays. If none are named, all but `sweep` run, whose rows are drawn as lines over context lengths;
`--limit-s` ends them within ten minutes. `peers` needs a folder with kvpress (see gpu/peers.py), `lookup` a model that
was pulled.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.commands import argument_parser
from benchmarks.gpu.page import part_rows, write_page
from benchmarks.gpu.targets import POLICY, SHORTENED, lines, table
from benchmarks.rows import ROOT
from kvfold.models.pull.pull import model_folder

LOOKUPS = (("float32", "never"), ("bfloat16", "now"))  # fp32 for the tokens, bf16 for their speed
DEFAULT = ("attention", "step", "prefill", "capacity", "lookup", "peers")


@dataclass(frozen=True)
class Part:
    """Commands (what stands behind `python -m benchmarks.`) that run in turn, and the seconds they have together."""

    name: str
    commands: Sequence[Sequence[str]]
    limit_s: float


def parts(site: Path | None, lookup_model: str) -> dict[str, Part]:
    prefill = ("gpu", "prefill", "--lengths")
    lookup = ("lookup", "--model", lookup_model, "--device", "cuda", "--prompts", "edit", "quote", "--tokens", "192")
    every = (
        Part("attention", [["gpu", "attention"]], 80),
        Part("step", [["gpu", "decode"]], 170),
        Part(
            "prefill",
            [
                [*prefill, "32768"],
                [*prefill, "131072", "--policies", POLICY],
                [*prefill, "16384", "--policies", *SHORTENED],
            ],
            170,
        ),
        Part("capacity", [["gpu", "capacity"]], 80),
        Part("lookup", [[*lookup, "--dtype", dtype, "--compile", when] for dtype, when in LOOKUPS], 130),
        Part("peers", [["gpu", "peers", "--site", str(site), "--shapes", "32768x1,131072x1,32768x16"]], 110),
        Part("sweep", [["gpu", "sweep"]], 200),
    )
    return {part.name: part for part in every}


def why_not(part: str, site: Path | None, lookup_model: str) -> str | None:
    """A sentence, where a part cannot run here."""
    if part == "peers" and site is None:
        return "needs --site, a folder with kvpress"
    if part == "lookup" and not is_pulled(lookup_model):
        return f"{lookup_model} is not here; kvfold models pull {lookup_model}"
    return None


def is_pulled(model: str) -> bool:
    return Path(model).is_dir() or model_folder(model).is_dir()


def run(part: Part, deadline: float, log: IO[str] | None) -> str:
    """How it went, in a few words."""
    began = time.monotonic()
    ends = min(began + part.limit_s, deadline)
    for name, *options in part.commands:
        command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--save"]
        # A group of its own: compilers that the command started go with it.
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"out of time after {time.monotonic() - began:.0f} s, in {shlex.join([name, *options])}"
        if code:
            return f"failed in {shlex.join([name, *options])}, exit code {code}"
    return f"{time.monotonic() - began:.0f} s"


def run_all(args: argparse.Namespace) -> None:
    os.environ.setdefault("KVFOLD_RUN", time.strftime("%Y%m%dT%H%M%S"))
    deadline, known = time.monotonic() + args.limit_s, parts(args.site, args.lookup_model)
    outcomes = {}
    for name in args.parts:
        reason = why_not(name, args.site, args.lookup_model)
        outcomes[name] = f"skipped: {reason}" if reason else _logged(known[name], deadline, args.logs)
        print(f"{name}: {outcomes[name]}", flush=True)
    rows = [row for name in args.parts for row in part_rows(name, os.environ["KVFOLD_RUN"])]
    print(f"\n{table(lines(rows))}\n")
    print("; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))


def _logged(part: Part, deadline: float, folder: Path | None) -> str:
    if folder is None:
        return run(part, deadline, None)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part.name}.log"
    with path.open("w", encoding="utf-8") as log:
        outcome = run(part, deadline, log)
    if "failed" in outcome:
        outcome += "\n    " + "\n    ".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-6:])
    return outcome


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("gpu table", __doc__)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(DEFAULT), metavar="NAME,NAME")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="where kvpress is unpacked")
    parser.add_argument("--lookup-model", default="qwen2.5-coder-1.5b", metavar="NAME")
    parser.add_argument("--limit-s", type=float, default=580, help="for all parts together (default: %(default)s)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write the parts' output there, not to the screen")
    parser.add_argument("--table", action="store_true", help="only print the table of rows that were saved")
    parser.add_argument("--docs", action="store_true", help="only write gpu.md and gpu.svg from saved rows")
    args = parser.parse_args(arguments)
    known = parts(None, "")
    if unknown := [name for name in args.parts if name not in known]:
        parser.error(f"no part {', '.join(unknown)}; parts: {', '.join(known)}")
    return args


def main(arguments: Sequence[str]) -> None:
    args = parse_options(arguments)
    if args.docs:
        write_page()
    elif args.table:
        print(table(lines(row for name in parts(None, "") for row in part_rows(name))))
    else:
        run_all(args)
