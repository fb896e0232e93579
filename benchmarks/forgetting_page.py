"""Write "Learning in weights" of docs/memory.md from rows kept in benchmarks/results/forgetting.jsonl.

    python -m benchmarks.forgetting_page

Arms are compared where they have learnt the same share of domain B. For every share an arm has the learning rate that
forgets least among those that reach the share in all seeds; intervals are over seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.commands import argument_parser, run_main
from benchmarks.docs_section import with_section
from benchmarks.forgetting_train import forgetting_at
from benchmarks.rows import RESULTS, ROOT, Row, markdown_table, read_rows
from kvfold.bench.statistics import Estimate, mean_interval
from kvfold.errors import InputError

PAGE = ROOT / "docs" / "memory.md"
KEPT = RESULTS / "forgetting.jsonl"
BEGIN = "<!-- learning in weights: begin; written by `python -m benchmarks.forgetting_page` -->"
END = "<!-- learning in weights: end -->"
ACQUIRED = (0.25, 0.5, 0.75, 0.9)
ARMS = {
    "tfidf": "slots by TF-IDF",
    "tf": "slots by attention mass",
    "random": "slots at random",
    "dense": "all slots (prefix tuning)",
    "lora": "LoRA",
    "full": "full finetuning",
}
TEXT = """## Learning in weights

An experiment, of which nothing is in the package: does an update that trains few KV slots forget less than one that
trains all? `python -m benchmarks.forgetting` teaches a model domain A ({facts} invented facts about people), then
domain B ({facts} about minerals), and asks in a wording that was not trained. The first four arms train a prefix of
{slots} key/value slots in every layer and KV head, which learnt A densely. A step on B updates {top:.0%} of the
slots: by TF-IDF of attention mass against batches of A, by mass alone, or a fixed random set; or it updates all. LoRA
has rank 8 on all linear layers.

Forgetting is (A before - A after) / A before in %, where an arm has learnt the same share of B: the mean of {seeds}
seeds with its 95 % interval, at the learning rate of {rates} that forgets least; – where no rate reached that share
in every seed within {steps} steps. {model}, {device}, {date}, commit {commit}:

{table}

The paper on sparse memory finetuning ([arXiv 2510.15103](https://arxiv.org/abs/2510.15103)) reports 11 % forgetting
for its model of 1.3B parameters with a memory layer, 71 % for LoRA and 89 % for full finetuning. Its slots are a
million rows of a pretrained product-key memory; those here are a prefix of a frozen model."""


@dataclass(frozen=True)
class Best:
    rate: float
    forgetting: Estimate


def best(rows: Sequence[Row], arm: str, acquired: float) -> Best | None:
    """The learning rate that forgets least among those that learn this share of B in every seed."""
    mine = [row for row in rows if row["arm"] == arm and "rate" in row]
    num_seeds, found = len({row["seed"] for row in mine}), []
    for rate in dict.fromkeys(row["rate"] for row in mine):
        curves = [(row["a_before"], row["curve"]) for row in mine if row["rate"] == rate]
        shares = [forgetting_at(acquired, before, curve["a"], curve["b"]) for before, curve in curves]
        known = [share for share in shares if share is not None]
        if len(known) == num_seeds >= 2:
            found.append(Best(rate, mean_interval(known)))
    return min(found, key=lambda each: each.forgetting.mean, default=None)


def table(rows: Sequence[Row]) -> str:
    lines = []
    for arm, name in ARMS.items():
        mine = [row for row in rows if row["arm"] == arm]
        if mine:
            before = sum(row["a_before"] for row in mine) / len(mine)
            touched = [row["touched"] for row in mine if "touched" in row]
            share = f"{sum(touched) / len(touched):.0%}" if touched else ""
            lines.append([name, share, f"{before:.0%}", *(_cell(best(rows, arm, level)) for level in ACQUIRED)])
    head = ["arm", "slots changed in all", "A before", *(f"forgotten at B = {level:.0%}" for level in ACQUIRED)]
    return markdown_table(head, lines)


def _cell(found: Best | None) -> str:
    if found is None:
        return "–"
    estimate = found.forgetting
    return f"{100 * estimate.mean:.0f} [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]"


def body(rows: Sequence[Row]) -> str:
    """Of seeds that all arms and rates have."""
    runs = [row for row in rows if "rate" in row]
    cells = {(row["arm"], row["rate"]) for row in runs}
    seeds = [seed for seed in {row["seed"] for row in runs} if sum(row["seed"] == seed for row in runs) == len(cells)]
    if len(seeds) < 2:
        raise InputError(f"{len(seeds)} seeds have one row for each arm and rate; keep rows of one run with 2 or more")
    complete = [row for row in runs if row["seed"] in seeds]
    rates = max(len({rate for name, rate in cells if name == arm}) for arm, _ in cells)
    return TEXT.format(**{**complete[0], "seeds": len(seeds), "rates": rates, "table": table(complete)})


def kept() -> str:
    """Nothing, where no rows are kept."""
    return body(read_rows(KEPT)) if KEPT.exists() else ""


def main(arguments: Sequence[str]) -> None:
    argument_parser("forgetting_page", __doc__).parse_args(arguments)
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), BEGIN, END, kept()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
