"""Run `kvfold bench` in many processes on one machine, and keep the result as one run.

    python -m benchmarks.runs shards --processes 12 --out RUN [--limit-s 540] -- --suite standard --model M …

What stands behind -- are options of `kvfold bench`. First sizes are looked for, policies shared out over the processes;
then shards run with them. A run is bound by the host, so on a GPU as many processes pay as the processor has cores and
the memory has room for (`--arena`); NVIDIA's MPS (`nvidia-cuda-mps-control -d`) lets them run at once.

Every process has a folder with its log under RUN.parts; the first that fails ends all, and the end of its log is shown.
At the time limit, after Ctrl-C or when this is terminated, processes finish what they write, and RUN holds what there
is. The same command goes on from there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.commands import argument_parser
from benchmarks.rows import ROOT
from benchmarks.runs.keep import join_sizes, keep
from kvfold.bench.record import ROWS
from kvfold.bench.suite import SIZES
from kvfold.cli.bench import wanted_of
from kvfold.cli.main import build_parser
from kvfold.errors import KvfoldError

OUT_OF_TIME, INTERRUPTED = 3, 130
_GRACE_S = 60.0  # for a process that is told to stop: it ends with its batch
_LOG_CHARACTERS = 1500
_TOLD_EVERY_S = 20.0

Commands = Mapping[Path, Sequence[str]]  # by the folder of their process


class Failed(KvfoldError):
    """A process ended with an error; what it said."""


def main(arguments: Sequence[str]) -> int:
    began = time.monotonic()
    args = _options(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes have sessions of their own and would go on
    parts = args.out.with_name(f"{args.out.name}.parts")
    shards = [parts / str(index) for index in range(args.processes)]
    code = 0
    try:
        sizes = _sizes(args.bench, parts, args.processes, began + args.limit_s)
        more = [[*sizes, "--shard", f"{index}/{len(shards)}"] for index in range(len(shards))]
        commands = {folder: [*args.bench, *each] for folder, each in zip(shards, more, strict=True)}
        _run(commands, began + args.limit_s)
    except TimeoutError:
        code = OUT_OF_TIME
    except KeyboardInterrupt:
        code = INTERRUPTED
    if ran := [folder for folder in shards if (folder / ROWS).exists()]:
        shutil.rmtree(args.out, ignore_errors=True)
        keep(ran, args.out)
    if code:
        print(f"not all of it is done; the same command goes on from {parts}", file=sys.stderr)
    return code


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("runs shards", __doc__)
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="shards, and processes at once")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="folder of the run; it is written anew")
    parser.add_argument("--limit-s", type=float, default=float("inf"), metavar="S", help="end after so many seconds")
    parser.add_argument("bench", nargs="+", metavar="OPTION", help="of `kvfold bench`, behind --")
    args = parser.parse_args(arguments)
    if args.processes < 1:
        parser.error(f"--processes is {args.processes}; it must be at least 1")
    return args


def _sizes(bench: Sequence[str], parts: Path, num_processes: int, deadline: float) -> list[str]:
    """The option that names the file of all sizes; nothing where every policy runs as it is written."""
    wanted = wanted_of(build_parser().parse_args(["bench", *bench]))
    if not wanted.looks_for_sizes:
        return []
    found = parts / SIZES
    if not found.exists():
        shares = [f"{index}/{num_processes}" for index in range(num_processes)]
        commands = {parts / f"sizes-{index}": [*bench, "--find-sizes", share] for index, share in enumerate(shares)}
        _run(commands, deadline)
        join_sizes([folder / SIZES for folder in commands], found)
    return ["--sizes", str(found)]


def _run(commands: Commands, deadline: float) -> None:
    """All at once, to their end. Failed if one of them fails, TimeoutError at the deadline; none is left then."""
    running: dict[Path, subprocess.Popen[bytes]] = {}
    with ExitStack() as held:
        held.callback(lambda: _stop(running.values()))
        told = time.monotonic()
        for folder, options in commands.items():
            running[folder] = _started(folder, options, held)
        while running:
            for folder, code in [(folder, process.poll()) for folder, process in running.items()]:
                if code:
                    raise Failed(f"{folder.name} ended with {code}: {_end_of(_log(folder))}")
                if code == 0:
                    del running[folder]
            if time.monotonic() > deadline:
                raise TimeoutError
            if time.monotonic() > told + _TOLD_EVERY_S:
                told = time.monotonic()
                print(f"{sum(map(_num_rows, commands))} rows, {len(running)} processes left", file=sys.stderr)
            time.sleep(0.2)


def _started(folder: Path, options: Sequence[str], held: ExitStack) -> subprocess.Popen[bytes]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = held.enter_context(_log(folder).open("ab"))
    command = [sys.executable, "-m", "kvfold", "bench", *options, "--out", str(folder)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def _stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """As Ctrl-C does; what does not listen is killed."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    ends = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:].strip()


def _num_rows(folder: Path) -> int:
    path = folder / ROWS
    return path.read_bytes().count(b"\n") if path.exists() else 0
