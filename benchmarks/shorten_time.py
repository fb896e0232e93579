"""Does shortening pay: is shortening and reading what is left faster than reading the whole prompt?

    python -m benchmarks.shorten_time [--model smollm2-135m] [--tokens 4000,16000] [--plans "graph, 4x"] [--save]

A text of so many tokens (generated prose, or --text FILE) is read whole, and shortened and read, the two taking turns;
`plain_s`, `shorten_s` and `prefill_s` (of what is left) are medians over repeats. `speedup` is plain_s / (shorten_s +
prefill_s): above 1 it pays. A prompt longer than the trained context is timed all the same. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import kvfold
from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import Row, report
from kvfold.bench.haystack import prose
from kvfold.errors import InputError
from kvfold.policy import Policy
from kvfold.shortening.loaded_model import judge
from kvfold.shortening.shorten import Shorten, shorten_text

_QUESTION = "In which room does the maker of the copper kettle work, and who told the others about it?"


def text_of(model: kvfold.Model, length: int, file: Path | None) -> str:
    """The first `length` tokens of a file, or of generated prose."""
    text = file.read_text(encoding="utf-8") if file else ""
    sentences = prose(Random(0))
    while not file and len(text) < 8 * length:
        text += next(sentences) + " "
    ends = model.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    if len(ends) < length:
        raise InputError(f"{file} has {len(ends)} tokens; {length} are asked for")
    return text[: ends[length - 1][1]]


def prefill_s(model: kvfold.Model, text: str, policy: str) -> float:
    with kvfold.Session(model, policy, template=None) as session:
        session.extend(text)
        return session.prefill_s


def compare(model: kvfold.Model, text: str, plan: Shorten, args: argparse.Namespace) -> Row:
    plain: list[float] = []
    cut: list[float] = []
    left: list[float] = []
    for round_ in range(args.repeats + 1):
        short = shorten_text(text, plan, question=_QUESTION, tokenizer=model.tokenizer, model=judge(plan, model))
        times = short.seconds, prefill_s(model, short.text, args.policy), prefill_s(model, text, args.policy)
        if round_:  # the first warms up
            for found, seconds in zip((cut, left, plain), times, strict=True):
                found.append(seconds)
    plain_s, shorten_s, left_s = map(statistics.median, (plain, cut, left))
    return {
        "sent_tokens": short.num_tokens,
        "plain_s": plain_s,
        "shorten_s": shorten_s,
        "prefill_s": left_s,
        "speedup": plain_s / (shorten_s + left_s),
    }


def rows(model: kvfold.Model, args: argparse.Namespace) -> Iterator[Row]:
    for length in args.tokens:
        text = text_of(model, length, args.text)
        for name in args.plans.split(";"):
            plan = Policy.parse(f"shorten({name.strip()}, embedder={args.embedder})").shorten
            assert plan is not None
            yield {"plan": name.strip(), "tokens": length, **compare(model, text, plan, args)}


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("shorten_time", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policy", default="full", help="of the KV cache (default: full)")
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")], default=[4000, 16000])
    parser.add_argument(
        "--plans", default="graph, 4x, keep=none; rank, 4x, keep=none", help="between semicolons (default: %(default)s)"
    )
    parser.add_argument("--embedder", default="auto", help="default: %(default)s")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: generated prose)")
    parser.add_argument("--repeats", type=int, default=3, help="measured turns (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/shorten_time.jsonl")
    args = parser.parse_args(arguments)
    model = kvfold.load(args.model, device=args.device)
    report(
        "shorten_time", rows(model, args), save=args.save, model=args.model, policy=args.policy, embedder=args.embedder
    )


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
