"""Which page size, open block and superblock? Bytes held beside the slots, and the time of a decode step.

    python -m benchmarks.page_sizes --save            bytes after real prompts, for every combination of sizes
    python -m benchmarks.page_sizes --time --save     ms per token on this CPU, one size varied at a time
    python -m benchmarks.page_sizes --docs            rewrite the table of docs/research/sizes.md from saved rows

Small pages leave little of their last page empty, small superblocks little of their last superblock; but each is one
more thing to look up, and a short open block is sealed more often. One forward over the prompt fills the caches of all
combinations, so they hold the same slots wherever the open block is the same. `overhead` is all that a sequence holds
over the bytes of its slots (codes, scales, positions); `padding` leaves the open block out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product
from random import Random

from benchmarks.commands import argument_parser, run_main
from benchmarks.cpu_decode import timed
from benchmarks.docs_section import with_section
from benchmarks.rows import RESULTS, ROOT, Row, append_row, facts, markdown_table, percentile, read_rows
from kvfold.bench.haystack import prose
from kvfold.compression.round import check_size
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, SizeError
from kvfold.models.loader import Model, load
from kvfold.pages.arena import SUPERBLOCK_BYTES, Arena
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.stats import measure

KEPT = RESULTS / "page_sizes.jsonl"
PAGE = ROOT / "docs" / "research" / "sizes.md"
BEGIN = "<!-- page sizes: begin; written by `python -m benchmarks.page_sizes --docs` -->"
END = "<!-- page sizes: end -->"
POLICIES = ("snapkv + ada + 8x", "snapkv + ada + 8x + int4")
AXES = {
    "page_size": (8, 16, 32, 64),
    "open_len": (16, 32, 64, 128),
    "superblock_bytes": tuple(kib * 1024 for kib in (16, 32, 64, 128, 256)),
}
ARENA_BYTES = 256 * 2**20  # an address range: memory is committed when it is written


@dataclass(frozen=True)
class Sizes:
    page_size: int = PageConfig.page_size
    open_len: int = PageConfig.open_len
    superblock_bytes: int = SUPERBLOCK_BYTES

    def sequence(self, model: Model, policy: str) -> SequenceCache:
        """An empty sequence in an arena of its own."""
        arena = Arena(ARENA_BYTES, superblock_bytes=self.superblock_bytes)
        return SequenceCache(arena, model.spec, Policy.parse(policy), PageConfig(self.page_size, self.open_len))


def all_sizes() -> list[Sizes]:
    return [Sizes(*values) for values in product(*AXES.values())]


def one_at_a_time() -> list[Sizes]:
    """The defaults, and each axis varied with the others at their default."""
    varied = [replace(Sizes(), **{axis: value}) for axis, values in AXES.items() for value in values]
    return list(dict.fromkeys([Sizes(), *varied]))


@dataclass(frozen=True)
class Filled:
    """A cache after the prompt; None where the size is below what its open block and protected slots take."""

    policy: str
    tokens: int
    sizes: Sizes
    sequence: SequenceCache | None

    @property
    def about(self) -> Row:
        return {"policy": self.policy, "tokens": self.tokens, **asdict(self.sizes)}


def fill(runner: Runner, model: Model, num_tokens: int, sizes: Iterable[Sizes]) -> list[Filled]:
    """Every policy under every sizes, after the same prompt."""
    text = " ".join(islice(prose(Random(1)), num_tokens // 8))
    ids = model.tokenizer(text)["input_ids"][:num_tokens]
    if len(ids) < num_tokens:
        raise InputError(f"the prose gave {len(ids)} of {num_tokens} tokens; this is a fault of the benchmark")
    found = [_open(model, policy, num_tokens, each) for policy in POLICIES for each in sizes]
    runner.prefill_many([each.sequence for each in found if each.sequence is not None], ids)
    return found


def _open(model: Model, policy: str, num_tokens: int, sizes: Sizes) -> Filled:
    sequence = sizes.sequence(model, policy)
    try:
        check_size(sequence, num_tokens)
    except SizeError:
        return Filled(policy, num_tokens, sizes, None)
    return Filled(policy, num_tokens, sizes, sequence)


def bytes_row(filled: Filled) -> Row:
    if filled.sequence is None:
        return {"question": "bytes", **filled.about, "note": "too small"}
    stats, open_bytes = measure(filled.sequence), filled.sequence.open.num_bytes
    slot_bytes = stats.bytes_per_step  # the open block is empty after a prompt
    return {
        "question": "bytes", **filled.about, "slots": stats.mean_slots, "slot_bytes": slot_bytes,
        "resident_bytes": stats.resident_bytes, "open_bytes": open_bytes,
        "overhead": stats.resident_bytes / slot_bytes, "padding": (stats.resident_bytes - open_bytes) / slot_bytes,
    }  # fmt: skip


def time_rows(runner: Runner, found: Sequence[Filled], num_steps: int) -> Iterator[Row]:
    """Sizes take turns, step by step. The mean counts: it holds the steps that seal an open block."""
    live = {str(i): (each, each.sequence) for i, each in enumerate(found) if each.sequence is not None}
    steps: dict[str, Callable[[], object]] = {
        name: partial(runner.decode, [sequence], [5]) for name, (_, sequence) in live.items()
    }
    for name, values in timed(steps, num_steps).items():
        spread = {"ms_p20": percentile(values, 20), "ms_p80": percentile(values, 80)}
        yield {"question": "decode step", **live[name][0].about, "ms": statistics.fmean(values), **spread}


def run(options: argparse.Namespace) -> None:
    model = load(options.model, device="cpu", dtype=options.dtype, memory=ARENA_BYTES)
    runner = Runner(model.hf, model.spec, model.arena)
    about = facts(model=options.model, dtype=str(model.spec.dtype), kv_dtype=str(model.spec.kv_dtype))
    rows: list[Row] = []
    for num_tokens in options.tokens:
        found = fill(runner, model, num_tokens, one_at_a_time() if options.time else all_sizes())
        rows += time_rows(runner, found, options.steps) if options.time else map(bytes_row, found)
    if options.save:
        for row in rows:
            append_row(KEPT.stem, {**row, **about})
    print(table(rows))
    print(json.dumps({"rows": rows, **about}))


def table(rows: Sequence[Row]) -> str:
    """Markdown: one size varied at a time down, policies and lengths across; the defaults are bold."""
    columns = list(dict.fromkeys((row["policy"], row["tokens"]) for row in rows))
    lines = []
    for axis, values in AXES.items():
        for value in values:
            sizes = replace(Sizes(), **{axis: value})
            cells = [_cell([row for row in rows if _is_of(row, column, sizes)]) for column in columns]
            lines.append([_label(axis, value), *cells])
    return markdown_table(["size", *(f"`{policy}`, {tokens:,}" for policy, tokens in columns)], lines)


def _is_of(row: Row, column: tuple[str, int], sizes: Sizes) -> bool:
    return (row["policy"], row["tokens"]) == column and all(row[axis] == size for axis, size in asdict(sizes).items())


def _cell(rows: Sequence[Row]) -> str:
    """overhead (padding), ms; the last row of each question counts, as saved rows are only ever added to."""
    latest = {row["question"]: row for row in rows}
    texts = []
    if "bytes" in latest:
        row = latest["bytes"]
        texts.append(row.get("note") or f"{row['overhead']:.2f} ({row['padding']:.2f})")
    if "decode step" in latest:
        texts.append(f"{latest['decode step']['ms']:.1f} ms")
    return ", ".join(texts) or "-"


def _label(axis: str, value: int) -> str:
    name = f"superblock {value // 1024} KiB" if axis == "superblock_bytes" else f"{axis.split('_')[0]} {value}"
    return f"**{name}**" if getattr(Sizes(), axis) == value else name


def with_table(page: str, rows: Sequence[Row]) -> str:
    """The page with the part between its markers written anew."""
    about = dict.fromkeys(f"{row['model']}, {row['device']}, commit {row['commit']}, {row['date']}" for row in rows)
    return with_section(page, BEGIN, END, f"{table(rows)}\n\n{'; '.join(about)}.")


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("page_sizes", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000], help="of the prompts")
    parser.add_argument("--time", action="store_true", help="time decode steps instead of counting bytes")
    parser.add_argument("--steps", type=int, default=128, help="timed steps of each (default: 128, the longest block)")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/page_sizes.jsonl")
    parser.add_argument("--docs", action="store_true", help="only rewrite docs/research/sizes.md from saved rows")
    options = parser.parse_args(arguments)
    if options.docs:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read_rows(KEPT)), encoding="utf-8")
    else:
        run(options)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
