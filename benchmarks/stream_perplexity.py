"""Does an endless stream stay readable in constant memory?

    python benchmarks/stream_perplexity.py --text FILE [FILE …] [--model smollm2-135m] [--tokens 100000] [--save]
    python benchmarks/stream_perplexity.py --plot

Reads a long text through each policy in one session, compressing between chunks, and reports perplexity, arena bytes
and process memory for every block of 10,000 tokens. Texts differ in difficulty from block to block, so each block is
also read by a fresh sequence of the first policy (the control): a stream that works stays at its control, far past the
trained window.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kvfold
from benchmarks.rows import append_row, facts
from kvfold.engine.runner import Runner
from kvfold.errors import MissingExtra
from kvfold.models.loader import Model

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("streaming + 1024tok + slot", "recent + 1024tok + slot + protect(none)", "streaming + 1024tok")
BLOCK_LEN = 10_000
CONTROL = "control: a fresh sequence per block"


def blocks(model: Model, policy: str, tokens: list[int], *, fresh: bool = False) -> Iterator[dict[str, object]]:
    """Perplexity and memory of each block, in one sequence or, as the control, in a fresh one for every block."""
    runner = Runner(model.hf, model.spec, model.arena)
    sequence = runner.new_sequence(kvfold.Policy.parse(policy))
    try:
        for begin in range(0, len(tokens), BLOCK_LEN):
            if fresh:
                sequence.release()
                sequence = runner.new_sequence(kvfold.Policy.parse(policy))
            began = time.perf_counter()
            logprobs = runner.logprobs(sequence, tokens[begin : begin + BLOCK_LEN])
            yield {
                "policy": CONTROL if fresh else policy, "end": min(begin + BLOCK_LEN, len(tokens)),
                "perplexity": math.exp(-logprobs.mean().item()), "arena_bytes": model.arena.lent_bytes,
                "resident_bytes": sequence.resident_bytes, "process_bytes": _process_bytes(),
                "s": time.perf_counter() - began,
            }  # fmt: skip
    finally:
        sequence.release()


def _process_bytes() -> int:
    """Resident memory of this process now (Linux), else its peak; on a GPU the allocator's bytes."""
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """Perplexity above, memory below, over the tokens read."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("plots need matplotlib; install it with: pip install 'kvfold[bench]'") from None

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvfold"
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 2))
    for policy in dict.fromkeys(str(row["policy"]) for row in rows):
        mine = [row for row in rows if row["policy"] == policy]
        ends = [int(str(row["end"])) // 1000 for row in mine]
        upper.plot(ends, [float(str(row["perplexity"])) for row in mine], marker="o", label=policy)
        sized = [row for row in mine if "resident_bytes" in row]
        lower.plot(ends[: len(sized)], [float(str(row["resident_bytes"])) / 1e6 for row in sized], marker="o")
    upper.set(yscale="log", ylabel="perplexity per 10k block")
    upper.legend(fontsize=8)
    lower.set(xlabel="tokens read (thousands)", ylabel="cache, MB", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", type=Path, help="text files, read one after the other")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/stream_perplexity.jsonl")
    parser.add_argument("--plot", action="store_true", help="only redraw docs/stream.svg from saved rows")
    args = parser.parse_args()
    if args.plot:
        saved = (ROOT / "benchmarks/results/stream_perplexity.jsonl").read_text(encoding="utf-8").splitlines()
        plot([json.loads(line) for line in saved], ROOT / "docs/stream.svg")
        return
    if not args.text:
        parser.error("--text names the files to read")
    model = kvfold.load(args.model, device=args.device, dtype=args.dtype)
    text = "\n".join(path.read_text(encoding="utf-8") for path in args.text)
    tokens = model.tokenizer(text)["input_ids"][: args.tokens]
    about = facts(model=args.model, dtype=str(model.spec.dtype), kv_dtype=str(model.spec.kv_dtype))
    rows = []
    runs = [(policy, False) for policy in args.policies] + [(args.policies[0], True)]
    for policy, fresh in runs:
        for row in blocks(model, policy, tokens, fresh=fresh):
            rows.append(row)
            cache, process = (int(str(row[name])) / 1e6 for name in ("resident_bytes", "process_bytes"))
            print(
                f"{row['policy']:45s} to {row['end']:>7}: perplexity {row['perplexity']:8.2f}  cache {cache:6.2f} MB  "
                f"process {process:7.1f} MB  {row['s']:5.1f} s",
                flush=True,
            )
            if args.save:
                append_row("stream_perplexity", {**row, **about})
    print(json.dumps({"rows": rows, **about}))


if __name__ == "__main__":
    main()
