"""Keep a run of `kvfold bench`, or all of its shards, as one folder of results.

    python -m benchmarks.runs keep SHARD [SHARD …] --out benchmarks/results/NAME

Rows are those of the shards in the order of their keys, compressed (`*.jsonl.xz`; `xzcat` shows them); where they were
written is left out of the command. The same command with `--out` of the new folder goes on with it: rows that are there
are not run again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.commands import argument_parser
from kvfold.atomic_io import write_whole
from kvfold.bench.record import (
    DIAGNOSTICS,
    PROMPTS,
    ROWS,
    Key,
    Recorded,
    Row,
    commits_of,
    read_run,
    write_compressed,
    write_run,
)
from kvfold.bench.suite import SIZES
from kvfold.errors import InputError


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("runs keep", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="SHARD")
    parser.add_argument("--out", required=True, type=Path, help="a folder that is not there yet")
    args = parser.parse_args(arguments)
    if args.out.exists():
        parser.error(f"{args.out} exists; name a new folder")
    keep(args.runs, args.out)


def keep(runs: Sequence[Path], out: Path) -> None:
    """Write the shards of one run to a new folder."""
    merged = merge([read_run(folder) for folder in runs])
    if len(merged) > 1:
        raise InputError(f"these are {len(merged)} different runs; give the shards of one")
    (recorded,) = merged
    command = re.sub(r" --(out|shard|sizes) \S+", "", recorded.run.command)
    write_run(out, replace(recorded.run, command=command, shard="0/1"))
    kept = ((ROWS, recorded.rows), (PROMPTS, recorded.prompts), (DIAGNOSTICS, recorded.diagnostics))
    for name, rows in kept:
        if rows:
            write_compressed(out / name, sorted(rows, key=lambda row: row.key))
    join_sizes([folder / SIZES for folder in runs], out / SIZES)
    print(f"{len(recorded.rows)} rows of {len(recorded.prompts)} prompts in {out}")


def join_sizes(files: Sequence[Path], out: Path) -> None:
    """A run of policies as they are written has looked for none."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files if path.exists()]
    sizes = {json.dumps(item): item for items in found for item in items}
    write_whole(out, json.dumps([sizes[key] for key in sorted(sizes)], indent=1) + "\n")


def merge(runs: Sequence[Recorded]) -> list[Recorded]:
    """Runs of one configuration as one, in the order they came; a row that several hold must be the same in all."""
    groups: list[list[Recorded]] = []
    for recorded in runs:
        same = (group for group in groups if group[0].run.configuration == recorded.run.configuration)
        group = next(same, None)
        if group is None:
            groups.append([recorded])
        else:
            group.append(recorded)
    return [_merged(group) if len(group) > 1 else group[0] for group in groups]


def _merged(group: Sequence[Recorded]) -> Recorded:
    shards = ", ".join(sorted({recorded.run.shard for recorded in group}))
    rows: dict[Key, Row] = {}
    for row in (row for recorded in group for row in recorded.rows):
        if rows.setdefault(row.key, row).answer != row.answer:
            raise InputError(f"two answers of {' '.join(map(str, row.key))} differ; give each shard of a run once")
    prompts = {row.key: row for recorded in group for row in recorded.prompts}
    diagnostics = {row.key: row for recorded in group for row in recorded.diagnostics}
    run = replace(group[0].run, shard=shards, commit=commits_of(recorded.run for recorded in group))
    return Recorded(run, tuple(rows.values()), tuple(prompts.values()), tuple(diagnostics.values()))
