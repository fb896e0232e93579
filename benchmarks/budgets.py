"""Which budget loses least of what stands in a prompt, when it is compressed before the question is known?

    python benchmarks/budgets.py --model smollm2-135m --tokens 600 --samples 12
    python benchmarks/budgets.py --scores keydiff --budgets ada global 'adaptive(loss=0.05)' --sizes 4x

Each needle prompt is read once, under all policies; then the right answer is read after the question, and its mean log
probability per token compared with the full cache's: 0 is no loss. Cheaper than writing answers, and finer where few
prompts can be had. Prints a line after every prompt on standard error, then a table and one line of JSON; Ctrl-C ends
with those of the prompts that are done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs where kvfold is not installed

from benchmarks.rows import facts
from kvfold.bench.prompts import PromptBuilder
from kvfold.bench.workloads import Sample, Setting, find
from kvfold.engine.runner import Runner
from kvfold.models.check import check_policy
from kvfold.models.loader import Model, load
from kvfold.policy.policy import Policy

TASKS = ("niah_single_2", "niah_multikey_1", "niah_multivalue")  # of RULER; they take turns
BUDGETS = ("uniform", "ada", "global", "lava", "xkv", "dynamickv", "adaptive")


class Found(NamedTuple):
    """Of one policy and prompt: mean log probability of the answer's tokens, and slots kept per head and token."""

    logprob: float
    kept: float


def main() -> None:
    options = parse_options()
    model = load(options.model)
    sized = [f"{s} + {b} + {size}" for s in options.scores for b in options.budgets for size in options.sizes]
    policies = [Policy.parse(text) for text in ("full", *sized)]
    for policy in policies:
        check_policy(policy, model.spec)
    setting = Setting(options.tokens, options.seed, PromptBuilder(model.tokenizer).count_tokens)
    samples = islice(find("ruler").samples(setting, options.samples, TASKS), options.samples)
    found: list[list[Found]] = []
    with suppress(KeyboardInterrupt):
        for number, sample in enumerate(samples, 1):
            found.append(ask(model, policies, sample))
            print(f"prompt {number}/{options.samples}", file=sys.stderr, flush=True)
    if found:
        tell(["full", *sized], found, options)


def ask(model: Model, policies: list[Policy], sample: Sample) -> list[Found]:
    """One prefill for all policies, then question and answer for each."""
    runner = Runner(model.hf, model.spec, model.arena)
    sequences = [runner.new_sequence(policy) for policy in policies]
    prompt = PromptBuilder(model.tokenizer).prompt(sample)
    answer = model.tokenizer(", ".join(sample.answers), add_special_tokens=False)["input_ids"]
    asked = [*prompt.question_ids, *answer]
    found = []
    try:
        runner.prefill_many(sequences, prompt.context_ids)
        for sequence in sequences:
            lens = [length for i in model.spec.compressible_layers for length in sequence.stored_lens(i)]
            kept = statistics.mean(lens) / len(prompt.context_ids)
            logprobs = runner.logprobs(sequence, asked, compress=False)[-len(answer) :]
            found.append(Found(float(logprobs.mean()), kept))
        return found
    finally:
        for sequence in sequences:
            sequence.release()


def tell(policies: list[str], found: list[list[Found]], options: argparse.Namespace) -> None:
    """Differences to the full cache, prompt by prompt: their mean and its standard error."""
    rows = []
    print(f"{'policy':48} {'kept':>7} {'loss, nats per token':>22}")
    for place, policy in enumerate(policies):
        losses = [row[0].logprob - row[place].logprob for row in found]
        kept = statistics.mean(row[place].kept for row in found)
        error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
        rows.append({"policy": policy, "kept": kept, "loss": statistics.mean(losses), "error": error})
        print(f"{policy:48} {100 * kept:5.1f} % {rows[-1]['loss']:14.2f} ± {error:.2f}")
    print(
        json.dumps({**facts(), "model": options.model, "tokens": options.tokens, "prompts": len(found), "rows": rows})
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=600, help="of a prompt (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=12, help="prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scores", nargs="+", default=["snapkv", "keydiff"])
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--sizes", nargs="+", default=["4x", "8x"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
