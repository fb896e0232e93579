"""Do checked steps help: how many running sums are right with and without `ArithmeticCheck`, and at which cost?

    python -m benchmarks.verify [--model smollm2-135m] [--chains 20] [--numbers 5] [--largest 9] [--save]

A model adds numbers one at a time, a line for each sum, behind two worked examples, greedily. `none` takes every line
as it comes; `resample` and `reason` crop a line whose arithmetic is wrong and try again, by sampling or behind a note.
`lines_right`: lines whose result is the running sum so far. `chains_right`: chains whose last line is. `wasted`: share
of generated tokens that were cropped. The last line is JSON.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from random import Random

import kvfold
from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import Row, report
from kvfold.recurse.chain_report import ChainReport
from kvfold.recurse.checks import ArithmeticCheck
from kvfold.recurse.verify import Chain, Retry

_ARMS: dict[str, Retry | None] = {"none": None, "resample": "resample", "reason": "reason"}
_RESULT = re.compile(r"=\s*(-?\d+)\s*$")


def worked(numbers: Sequence[int]) -> str:
    """Numbers and their running sums, as an example shows them."""
    sums = list(accumulate(numbers))
    lines = [
        f"{before} + {number} = {after}" for before, number, after in zip(sums, numbers[1:], sums[1:], strict=False)
    ]
    return "\n".join([f"Numbers: {', '.join(map(str, numbers))}", *lines, ""])


def prompt(numbers: Sequence[int]) -> str:
    shown = worked([7, 5, 8, 3, 6]) + "\n" + worked([4, 9, 2, 8, 5])
    return f"Add the numbers one at a time.\n\n{shown}\n{worked(numbers).splitlines()[0]}\n"


def result_is(expected: int) -> Callable[[str], bool]:
    return lambda text: (found := _RESULT.search(text)) is not None and int(found[1]) == expected


def run_chain(
    model: kvfold.Model, policy: str, numbers: Sequence[int], retry: Retry | None
) -> tuple[Chain, ChainReport]:
    checks = [] if retry is None else [ArithmeticCheck(required=True)]
    with kvfold.Session(model, policy, template=None) as session:
        session.extend(prompt(numbers), compress=False)
        chain = Chain(session, checks, retry=retry or "resample", keep_failed=True)
        for expected in list(accumulate(numbers))[1:]:
            chain.step(max_new_tokens=16, is_right=result_is(expected))
        return chain, chain.report()


def rows(model: kvfold.Model, args: argparse.Namespace) -> Iterator[Row]:
    random = Random(args.seed)
    problems = [[random.randint(2, args.largest) for _ in range(args.numbers)] for _ in range(args.chains)]
    for arm, retry in _ARMS.items():
        found = [run_chain(model, args.policy, numbers, retry) for numbers in problems]
        lines = [step.last_right for chain, _ in found for step in chain.steps]
        generated = sum(report.tokens_generated for _, report in found)
        yield {
            "arm": arm,
            "lines": len(lines),
            "lines_right": sum(map(bool, lines)) / len(lines),
            "chains_right": sum(bool(chain.steps[-1].last_right) for chain, _ in found) / len(found),
            "retries": sum(report.retries for _, report in found),
            "failed": sum(report.failed for _, report in found),
            "generated": generated,
            "wasted": sum(report.tokens_wasted for _, report in found) / generated,
        }


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("verify", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policy", default="full", help="of the KV cache (default: full)")
    parser.add_argument("--chains", type=int, default=20, help="problems (default: %(default)s)")
    parser.add_argument("--numbers", type=int, default=5, help="of a problem (default: %(default)s)")
    parser.add_argument("--largest", type=int, default=9, help="number to add (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/verify.jsonl")
    args = parser.parse_args(arguments)
    model = kvfold.load(args.model, device=args.device)
    report("verify", rows(model, args), save=args.save, model=args.model, policy=args.policy)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
