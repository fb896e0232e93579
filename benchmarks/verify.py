"""Do checked steps help: how many running sums are right with and without `ArithmeticCheck`, and at which cost?

    python -m benchmarks.verify [--model smollm2-135m] [--chains 20] [--numbers 5] [--largest 9] [--save]
    python -m benchmarks.verify --long 64000 [--model qwen2.5-coder-1.5b] [--policy POLICY] [--save]

A model adds numbers one at a time, a line for each sum, behind two worked examples, greedily. `none` takes every line
as it comes; `resample` and `reason` crop a line whose arithmetic is wrong and try again, by sampling or behind a note.
`lines_right`: lines whose result is the running sum so far. `chains_right`: chains whose last line is. `wasted`:
tokens that were cropped, and notes that were read, for each generated one. The last line is JSON.

`--long` runs one chain of so many tokens instead, a page of prose before each sum: first with old steps compressed, so
that it stays within the memory of an eighth of its tokens, then with the full cache. `peak_bytes` is the most that the
arena had in use, `held_bytes` what the cache holds in the end, `bound_bytes` the memory of that eighth in bf16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

import kvfold
from benchmarks import long_chain
from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import Row, report
from benchmarks.sums import prompt, result_is
from kvfold.errors import InputError
from kvfold.recurse.chain_report import ChainReport
from kvfold.recurse.checks import ArithmeticCheck
from kvfold.recurse.verify import Chain, Retry

_ARMS: dict[str, Retry | None] = {"none": None, "resample": "resample", "reason": "reason"}


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
        found = [run_chain(model, args.policy or "full", numbers, retry) for numbers in problems]
        lines = [step.last_right for chain, _ in found for step in chain.steps]
        generated = sum(report.tokens_generated for _, report in found)
        yield {
            "arm": arm,
            "policy": args.policy or "full",
            "chains": len(found),
            "numbers": args.numbers,
            "largest": args.largest,
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
    parser.add_argument("--policy", help="of the KV cache (default: full; of a long chain keydiff in int8)")
    parser.add_argument("--chains", type=int, default=20, help="problems (default: %(default)s)")
    parser.add_argument("--numbers", type=int, default=5, help="of a problem (default: %(default)s)")
    parser.add_argument("--largest", type=int, default=9, help="number to add (default: %(default)s)")
    parser.add_argument("--long", type=int, metavar="N", help="run one chain of N tokens instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/verify.jsonl")
    args = parser.parse_args(arguments)
    if args.chains < 1 or args.numbers < 2 or args.largest < 2:
        raise InputError("give --chains of 1 or more, --numbers of 2 or more and --largest of 2 or more")
    if args.long is not None:
        long_chain.check_length(args.long)
    model = kvfold.load(args.model, device=args.device, compile=False)
    found = rows(model, args) if args.long is None else long_chain.rows(model, args.long, args.policy, args.seed)
    report("verify", found, save=args.save, model=args.model)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
