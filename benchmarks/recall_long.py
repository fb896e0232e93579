"""Does a long stream find its needle again, in the same device bytes, when what it evicts can be recalled?

    python -m benchmarks.recall_long --model smollm2-135m --length 16000 --positions slot
    python -m benchmarks.recall_long --docs            rewrite docs/research/recall.md from the kept rows

One number is hidden in filler text, anywhere in it; the text is read in chunks of 512 under a bound of a few hundred
slots, and then asked for the number (task needles_1 of workload needle, the question unknown). `streaming`
gets as many bytes as `streaming + recall` holds on the device with its summaries and its staging area. `--full` adds
the full cache. A row for each policy is appended to the file of results; the last line of output is the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.commands import argument_parser, run_main
from benchmarks.docs_section import with_section
from benchmarks.rows import RESULTS, ROOT, Row, markdown_table, read_rows
from kvfold.bench.environment import commit, device_name
from kvfold.bench.prompts import PromptBuilder
from kvfold.bench.workloads import Sample, Setting, find
from kvfold.models.loader import Model, load
from kvfold.session import Session

KEPT = RESULTS / "recall.jsonl"
PAGE = ROOT / "docs" / "research" / "recall.md"
BEGIN, END = "<!-- recall: begin; written by `python -m benchmarks.recall_long --docs` -->", "<!-- recall: end -->"
_COLUMNS = ("tokens read", "policy", "needles found", "device MB", "host MB", "reading s", "ms a token")


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    if options.docs:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_section(text, BEGIN, END, report(read_rows(KEPT))), encoding="utf-8")
        return
    rows = run(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(report(rows))
    print(json.dumps(rows))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("recall_long", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="catalogue name or folder of a model to run")
    what.add_argument("--docs", action="store_true", help="rewrite docs/research/recall.md from the kept rows")
    parser.add_argument("--length", type=int, default=16000, help="tokens of a prompt (default: 16000)")
    parser.add_argument("--samples", type=int, default=10, help="prompts (default: 10)")
    parser.add_argument("--slots", type=int, default=512, help="slots that stay (default: 512)")
    parser.add_argument("--recall", default="recall", help="the term (default: recall)")
    parser.add_argument("--positions", default="keep", choices=("keep", "slot"), help="default: keep")
    parser.add_argument("--full", action="store_true", help="read with the full cache too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--memory", metavar="BYTES", help="of the arena, e.g. 2GB (default: most of what is free)")
    parser.add_argument("--out", type=Path, default=KEPT, help="file of rows (default: results/recall.jsonl)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> list[Row]:
    model = load(options.model, device=options.device, memory=options.memory)
    setting = Setting(options.length, options.seed, PromptBuilder(model.tokenizer).count_tokens)
    recalling = f"streaming + {options.slots}tok + {options.positions} + {options.recall}"
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for sample in find("needle").samples(setting, options.samples, ["needles_1"]):
        recalled = answer(model, recalling, sample)
        found[recalling].append(recalled)
        same = f"streaming + {int(recalled['device_bytes'])}B + {options.positions}"
        found[f"streaming + {options.positions}, in these bytes"].append(answer(model, same, sample))
        if options.full:
            found["full"].append(answer(model, "full", sample))
        hits = {name: sum(each["hit"] for each in rows) for name, rows in found.items()}
        print(sample.index + 1, hits, file=sys.stderr)
    return [row(options, model, name, rows) for name, rows in found.items()]


def answer(model: Model, policy: str, sample: Sample) -> dict[str, float]:
    """Read the document, and what a branch replies to the question."""
    prompt = PromptBuilder(model.tokenizer).prompt(sample)
    began = time.perf_counter()
    with Session(model, policy, template=None) as session:
        session.extend(prompt.context_ids)
        read_s, stats = time.perf_counter() - began, session.stats()
        session.extend(prompt.question_ids, compress=False)
        reply = session.generate(max_new_tokens=sample.max_new_tokens)
    return {
        "hit": float(sample.answers[0] in reply.text),
        "device_bytes": stats.resident_bytes,
        "host_bytes": stats.host_bytes,
        "read_s": read_s,
        "decode_ms": reply.decode_ms,
    }


def row(options: argparse.Namespace, model: Model, policy: str, samples: list[dict[str, float]]) -> Row:
    means = {name: sum(each[name] for each in samples) / len(samples) for name in samples[0] if name != "hit"}
    return {
        "model": model.name,
        "policy": policy,
        "length": options.length,
        "seed": options.seed,
        "samples": len(samples),
        "hits": int(sum(each["hit"] for each in samples)),
        **{name: round(mean, 3) for name, mean in means.items()},
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device_name(model.device),
    }


def report(rows: list[Row]) -> str:
    """A table for each run: rows of one model, length, commit and device."""
    runs: dict[str, list[Row]] = defaultdict(list)
    for each in rows:
        caption = f"{each['model']}, {each['samples']} prompts (seed {each['seed']}); {each['device']}; "
        runs[f"{caption}commit {each['commit']}, {each['date']}."].append(each)
    return "\n\n".join(f"{caption}\n\n{_table(mine)}" for caption, mine in runs.items())


def _table(rows: list[Row]) -> str:
    lines = []
    for each in rows:
        sizes = [f"{each[name] / 1e6:.1f}" for name in ("device_bytes", "host_bytes")]
        times = [f"{each['read_s']:.0f}", f"{each['decode_ms']:.0f}"]
        hits = f"{each['hits']} of {each['samples']}"
        lines.append([f"{each['length']:,}", f"`{each['policy']}`", hits, *sizes, *times])
    return markdown_table(_COLUMNS, lines)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
