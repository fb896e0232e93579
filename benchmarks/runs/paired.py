"""What does one policy lose against another on the same samples of a run, over all tasks?

    python -m benchmarks.runs paired RUN --policy "chunk(snapkv, reuse=2)" --against "chunk(snapkv)" [--memory 25%]

RUN is a folder of `kvfold bench`. Every task counts the same. Prints, for each mode and memory that both have (`full`
stands in all), the mean scores in percent, their difference with its 95 % bootstrap interval, the same in percent of
the other's score, and what both hold and read; then one line of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.commands import argument_parser
from kvfold.bench.paired import compare, line
from kvfold.bench.record import read_run
from kvfold.bench.report.merge import FULL


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("runs paired", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of `kvfold bench`")
    parser.add_argument("--policy", required=True, help="as the run names it, without a size")
    parser.add_argument("--against", default=FULL, metavar="POLICY", help="default: %(default)s")
    parser.add_argument("--memory", metavar="P%", help="default: all")
    args = parser.parse_args(arguments)
    recorded = read_run(args.run)
    found = compare(recorded, args.policy, args.against, args.memory)
    print("\n".join(map(line, found)))
    about = {"commit": recorded.run.commit, "device": recorded.run.device, "model": recorded.run.model}
    names = {"policy": args.policy, "against": args.against}
    print(json.dumps({**about, **names, "rows": [asdict(each) for each in found]}))
