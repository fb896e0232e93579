"""Does an endless stream stay readable in constant memory?

    python -m benchmarks.stream_perplexity --text A.txt B.txt --out ROWS.jsonl    run 8 streams of 100,000 tokens
    python -m benchmarks.stream_perplexity --text … --shard 0/8 --out …           one of eight processes
    python -m benchmarks.stream_perplexity --table ROWS.jsonl [ROWS.jsonl …]      perplexity and memory by block
    python -m benchmarks.stream_perplexity --keep ROWS.jsonl [ROWS.jsonl …]       keep a run under benchmarks/results/
    python -m benchmarks.stream_perplexity --docs                            rewrite docs/research/streaming.md from it
    python -m benchmarks.stream_perplexity --plot                            draw docs/research/stream.svg from it

The texts are joined; stream i of N starts at i/N of them and goes round. Every stream is read, in blocks of 10,000, by
each run: `stream` (sinks, the latest tokens, closed-up positions), `control` (the same in a fresh sequence for every
block), `recent` (no sinks) and, if asked for, `original` (positions as they were). Runs print their table on standard
output, then one line of JSON; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import RESULTS, ROOT, facts, svg_pyplot
from benchmarks.stream_blocks import DEFAULT_RUNS, RUNS, read_blocks, rotations
from benchmarks.stream_table import Mean, caption, means, read_rows, table, with_table
from kvfold.bench.countdown import Countdown
from kvfold.bench.haystack import read_text
from kvfold.bench.plan import Shard
from kvfold.errors import InputError
from kvfold.models.loader import DTYPES, Model, load

KEPT = RESULTS / "streams.jsonl"
PAGE = ROOT / "docs" / "research" / "streaming.md"
PLOT = ROOT / "docs" / "research" / "stream.svg"


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    if options.plot:
        plot(means(read_rows([KEPT]).blocks), PLOT)
    elif options.docs:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), KEPT), encoding="utf-8")
    elif options.keep:
        keep(options.keep)
    elif options.table:
        show(options.table)
    else:
        run(options)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("stream_perplexity", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="texts to read, joined in this order")
    what.add_argument("--table", nargs="+", type=Path, metavar="ROWS", help="print the table of files of rows")
    what.add_argument("--keep", nargs="+", type=Path, metavar="ROWS", help=f"write rows to {KEPT.relative_to(ROOT)}")
    what.add_argument("--docs", action="store_true", help="rewrite docs/research/streaming.md from kept rows")
    what.add_argument("--plot", action="store_true", help="draw docs/research/stream.svg from kept rows")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of weights and cache (default: auto)")
    parser.add_argument("--memory", metavar="BYTES", help="of the arena, e.g. 256MB (default: most of what is free)")
    parser.add_argument("--streams", type=int, default=8, help="rotations of the joined texts (default: 8)")
    parser.add_argument("--tokens", type=int, default=100_000, help="of a stream (default: 100000)")
    parser.add_argument("--block", type=int, default=10_000, help="tokens of a block (default: 10000)")
    parser.add_argument("--runs", nargs="+", default=DEFAULT_RUNS, choices=RUNS, help="default: all but original")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="only every Nth pair of run and stream")
    parser.add_argument("--out", type=Path, default=Path("streams.rows.jsonl"), metavar="ROWS", help="new file of rows")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """With as many shards as streams, shard i reads stream i under every run."""
    shard = Shard.parse(options.shard)
    pairs = [(name, stream) for name in options.runs for stream in range(options.streams)]
    mine = [pair for index, pair in enumerate(pairs) if shard.takes(index)]
    text = "\n".join(map(read_text, options.text))
    if options.out.exists():
        raise InputError(f"{options.out} exists; name a new file with --out")
    model = load(options.model, device=options.device, dtype=options.dtype, memory=options.memory)
    tokens = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    streams = rotations(tokens, options.streams, options.tokens)
    about = gather_facts(options, model, text, len(tokens))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file, _countdown(options, len(mine)) as countdown:
        for name, stream in mine:
            for block in read_blocks(model, name, stream, streams[stream], options.block):
                print(json.dumps(asdict(block) | about), file=file, flush=True)
                countdown.step()
    show([options.out])


def _countdown(options: argparse.Namespace, num_pairs: int) -> Countdown:
    return Countdown(f"{options.model} blocks", num_pairs * (options.tokens // max(options.block, 1)))


def gather_facts(options: argparse.Namespace, model: Model, text: str, num_tokens: int) -> dict[str, Any]:
    names = ", ".join(path.name for path in options.text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    workload = (
        f"{options.model}, {options.streams} streams of {options.tokens:,} tokens, rotations of {names} "
        f"({num_tokens:,} tokens, {digest})"
    )
    dtype = str(model.spec.dtype).removeprefix("torch.")
    return facts(workload=workload, dtype=dtype) | ({"commit": options.commit} if options.commit else {})


def show(paths: Sequence[Path]) -> None:
    rows = read_rows(paths)
    found = means(rows.blocks)
    print(caption(rows, found), table(found), sep="\n\n")
    print(json.dumps({"workload": rows.facts[0]["workload"], "means": [asdict(mean) for mean in found]}))


def keep(paths: Sequence[Path]) -> None:
    read_rows(paths)  # whole, and of one workload
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text("".join(path.read_text(encoding="utf-8") for path in paths), encoding="utf-8")
    print(f"rows of {len(paths)} files in {KEPT.relative_to(ROOT)}")


def plot(found: Sequence[Mean], path: Path) -> None:
    """Perplexity of all runs above, memory of the first run below, over the tokens read."""
    pyplot = svg_pyplot()
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(7, 5.5), sharex=True, height_ratios=(3, 2))
    for name in dict.fromkeys(mean.run for mean in found):
        mine = [mean for mean in found if mean.run == name]
        label = f"{name}: {mine[0].policy}"
        upper.plot([mean.end / 1000 for mean in mine], [mean.perplexity for mean in mine], marker="o", label=label)
    first = [mean for mean in found if mean.run == found[0].run]
    for label, values in memory_lines(first).items():
        lower.plot([mean.end / 1000 for mean in first], [value / 1e6 for value in values], marker="o", label=label)
    upper.set(yscale="log", ylabel=f"perplexity, {first[0].num_streams} streams")
    lower.set(yscale="log", xlabel="tokens read (thousands)", ylabel=f"MB, {first[0].run}")
    for axes in (upper, lower):
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def memory_lines(found: Sequence[Mean]) -> dict[str, list[int]]:
    """What was measured after every block."""
    lines: dict[str, list[int | None]] = {
        "arena": [mean.arena_bytes for mean in found],
        "CUDA tensors": [mean.cuda_bytes for mean in found],
        "host": [mean.host_bytes for mean in found],
    }
    known = {name: [value for value in values if value is not None] for name, values in lines.items()}
    return {name: values for name, values in known.items() if len(values) == len(found)}


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
