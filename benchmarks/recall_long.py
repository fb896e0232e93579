"""Does a long stream find its needle again, in the same device bytes, when what it evicts can be recalled?

    python benchmarks/recall_long.py --model smollm2-135m --length 16000 --positions slot
    python benchmarks/recall_long.py --docs            rewrite docs/research/recall.md from the kept rows

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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs where kvfold is not installed

from kvfold.bench.docs_section import with_section
from kvfold.bench.environment import commit, device_name
from kvfold.bench.prompts import PromptBuilder
from kvfold.bench.workloads import Sample, Setting, find
from kvfold.errors import KvfoldError
from kvfold.models.loader import Model, load
from kvfold.session import Session

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "results" / "recall.jsonl"
PAGE = ROOT / "docs" / "research" / "recall.md"
BEGIN, END = "<!-- recall: begin; written by `python benchmarks/recall_long.py --docs` -->", "<!-- recall: end -->"
_COLUMNS = ("tokens read", "policy", "needles found", "device MB", "host MB", "reading s", "ms a token")


def main() -> int:
    options = parse_options()
    try:
        rows = [] if options.docs else run(options)
    except KvfoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.docs:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_section(text, BEGIN, END, report(read_rows(KEPT))), encoding="utf-8")
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(report(rows))
    print(json.dumps(rows))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    return parser.parse_args()


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
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


def row(options: argparse.Namespace, model: Model, policy: str, samples: list[dict[str, float]]) -> dict[str, Any]:
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


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(rows: list[dict[str, Any]]) -> str:
    """A table for each run: rows of one model, length, commit and device."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in rows:
        caption = f"{each['model']}, {each['samples']} prompts (seed {each['seed']}); {each['device']}; "
        runs[f"{caption}commit {each['commit']}, {each['date']}."].append(each)
    return "\n\n".join(f"{caption}\n\n{_table(mine)}" for caption, mine in runs.items())


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [_COLUMNS, ["---"] * len(_COLUMNS)]
    for each in rows:
        sizes = [f"{each[name] / 1e6:.1f}" for name in ("device_bytes", "host_bytes")]
        times = [f"{each['read_s']:.0f}", f"{each['decode_ms']:.0f}"]
        hits = f"{each['hits']} of {each['samples']}"
        lines.append([f"{each['length']:,}", f"`{each['policy']}`", hits, *sizes, *times])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
