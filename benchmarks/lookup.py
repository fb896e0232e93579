"""How many tokens does a pass give, and how much faster is a reply, when drafts are looked up in the text?

    python -m benchmarks.lookup [--model smollm2-135m] [--dtype float32] [--policy full] [--tokens 96] [--save]

Two prompts whose answers repeat them (a function to be changed in one place, a passage to be quoted) and one whose
answer does not (a story). Each is read once; the reply is then written with and without drafts, from forks of that
session, the two taking turns. In float32 the tokens must be equal, or the run fails; elsewhere `same` tells how many
leading ones are. `s` is the decode time of a reply, median over repeats, without its first token, which the prompt's
pass gives; the last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from random import Random

import kvfold
from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import Row, percentile, report
from kvfold.bench.haystack import prose
from kvfold.core import Compile
from kvfold.models.loader import DTYPES

COMPILE: dict[str, Compile] = {"auto": "auto", "now": True, "never": False}
CODE = '''def total_price(items, discount):
    """Sum of prices after a discount, in cents."""
    total = 0
    for item in items:
        if item.price < 0:
            raise ValueError("negative price: " + item.name)
        total += item.price * item.amount
    if discount > 0:
        total = total - total * discount // 100
    return total
'''


def prompts() -> dict[str, str]:
    passage = " ".join(islice(prose(Random(3)), 12))
    return {
        "edit": f"Here is a function:\n\n{CODE}\nWrite the whole function again, with total renamed to cents.",
        "quote": f"{passage}\n\nRepeat the text above word for word.",
        "story": "Write a short story about a lighthouse keeper and a storm.",
    }


def measure(session: kvfold.Session, speculate: bool | int, num_tokens: int) -> tuple[kvfold.Reply, float]:
    """A reply from a fork, and its decode time in seconds."""
    with session.fork() as branch:
        reply = branch.generate(max_new_tokens=num_tokens, speculate=speculate)
    return reply, reply.decode_ms * max(len(reply.token_ids) - 1, 1) / 1e3


def compare(session: kvfold.Session, args: argparse.Namespace) -> Row:
    runs: dict[bool, list[tuple[kvfold.Reply, float]]] = {False: [], True: []}
    for round_ in range(args.repeats + 1):
        for drafts, found in runs.items():
            run = measure(session, args.draft if drafts else False, args.tokens)
            if round_:  # the first warms up
                found.append(run)
    (plain, _), (fast, _) = runs[False][0], runs[True][0]
    pairs = zip(plain.token_ids, fast.token_ids, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if args.dtype == "float32" and plain.token_ids != fast.token_ids:
        raise SystemExit(f"error: tokens differ from token {same} on; speculation must not change greedy output")
    plain_s, fast_s = ([seconds for _, seconds in runs[drafts]] for drafts in (False, True))
    return {
        "num_tokens": len(fast.token_ids),
        "same": same,
        "drafted": fast.stats.drafted,
        "accepted": fast.stats.accepted,
        "tokens_per_pass": fast.stats.tokens_per_pass,
        "plain_s": statistics.median(plain_s),
        "s": statistics.median(fast_s),
        "s_p20": percentile(fast_s, 20),
        "s_p80": percentile(fast_s, 80),
        "plain_tokens_per_s": (len(plain.token_ids) - 1) / statistics.median(plain_s),
        "tokens_per_s": (len(fast.token_ids) - 1) / statistics.median(fast_s),
        "speedup": statistics.median(plain_s) / statistics.median(fast_s),
    }


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("lookup", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--policy", action="append", help="may be repeated (default: full)")
    parser.add_argument("--prompts", nargs="+", default=list(prompts()), choices=list(prompts()), help="default: all")
    parser.add_argument("--compile", default="auto", choices=list(COMPILE), help="decoder layers, on a GPU")
    parser.add_argument("--draft", type=int, default=16, metavar="N", help="longest draft (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="longest reply (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measured turns (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/lookup.jsonl")
    return parser.parse_args(arguments)


def rows(model: kvfold.Model, args: argparse.Namespace) -> Iterator[Row]:
    for policy in args.policy or ["full"]:
        for name in args.prompts:
            with kvfold.Session(model, policy) as session:
                session.extend(prompts()[name])
                what = {"question": "lookup", "prompt": name, "policy": policy, "prompt_len": len(session.token_ids)}
                yield {**what, **compare(session, args)}


def main(arguments: Sequence[str]) -> None:
    args = parse_options(arguments)
    model = kvfold.load(args.model, dtype=args.dtype, device=args.device, compile=COMPILE[args.compile])
    about = {"dtype": str(model.spec.dtype), "kv_dtype": str(model.spec.kv_dtype), "draft": args.draft}
    report("lookup", rows(model, args), save=args.save, model=args.model, **about)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
