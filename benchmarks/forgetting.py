"""Does training only the KV slots that TF-IDF names forget less than dense training, LoRA or full finetuning?

    python -m benchmarks.forgetting [--model smollm2-135m] [--device auto] [--arms tfidf,tf,random,dense,lora,full]
                                    [--facts 64] [--slots 64] [--top 0.1] [--steps 100]
                                    [--seeds 3] [--first-seed 0] [--save]

Every arm learns domain A (invented facts about people), then domain B (minerals), in the same parameters. A question
in a wording that was not trained is right if greedy decoding writes its answer; B's acquisition is the share that is
right, forgetting is (A before - A after) / A before. Each arm runs with several learning rates, and A and B are scored
along the way, so that arms are compared where they have learnt the same share of B.

`tfidf`, `tf`, `random` and `dense` train a bank of KV slots in front of the frozen model, which learnt A densely:
updates change the `--top` share of slots by TF-IDF of attention mass (its background: batches of A), by mass alone,
a fixed random set, or all of them. `lora`: rank 8 on all linear layers; `full`: all weights. Rows: one for each seed,
arm and learning rate, with its curve. A run that would exceed --seconds is left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any

import torch

import kvfold
from benchmarks.commands import argument_parser, run_main
from benchmarks.forgetting_arms import FullLearner, LoraLearner
from benchmarks.forgetting_bank import BankLearner, Choice
from benchmarks.forgetting_facts import make_facts
from benchmarks.forgetting_train import Curve, Domain, learn
from benchmarks.rows import Row, report
from kvfold.bench.haystack import prose
from kvfold.errors import InputError

_BANK: dict[str, Choice] = {"dense": "all", "tfidf": "tfidf", "tf": "tf", "random": "random"}
_FAMILIES = {"bank": tuple(_BANK), "lora": ("lora",), "full": ("full",)}
_A_RATES = {"bank": 0.03, "lora": 1e-3, "full": 1e-4}
_RATES = {
    **dict.fromkeys(("tfidf", "tf", "random"), (0.01, 0.03, 0.06)),
    "dense": (0.003, 0.01, 0.03),
    "lora": (3e-4, 1e-3, 3e-3),
    "full": (3e-5, 1e-4, 3e-4),
}
_A_LEARNT, _B_LEARNT = 0.99, 0.95  # shares at which training ends
_BACKGROUND = 32  # batches of A, of 8 rows each


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("forgetting", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--arms", type=_arms, default=list(_RATES), help="default: all")
    parser.add_argument("--facts", type=int, default=64, help="of each domain (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=64, help="of a layer and KV head (default: %(default)s)")
    parser.add_argument(
        "--top", type=float, default=0.1, help="share of slots that a sparse step updates (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="on B at most (default: %(default)s)")
    parser.add_argument("--a-steps", type=int, default=150, help="on A at most (default: %(default)s)")
    parser.add_argument("--every", type=int, default=5, help="steps between scores (default: %(default)s)")
    parser.add_argument("--rates", type=_rates, help="learning rates on B of all arms; default: three for each")
    parser.add_argument("--a-rate", type=float, help="learning rate on A; default: one for each kind of arm")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="for runs side by side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for the whole run (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/forgetting.jsonl")
    args = parser.parse_args(arguments)
    if not 0 < args.top <= 1 or args.slots < 2:
        raise InputError(f"--top is {args.top} of {args.slots} slots; give a share of at most 1, of 2 slots or more")
    torch.set_float32_matmul_precision("high")
    model = kvfold.load(args.model, device=args.device, dtype="float32", compile=False)
    model.detach()
    model.hf.set_attn_implementation("eager")  # it returns attention weights
    about = {name: getattr(args, name) for name in ("model", "facts", "slots", "top", "batch", "steps")}
    report("forgetting", rows(model, args), save=args.save, **about)


def rows(model: kvfold.Model, args: argparse.Namespace) -> Iterator[Row]:
    """Seed by seed, so that a run that ends early has all arms of the first seeds."""
    until, slowest = time.monotonic() + args.seconds, 0.0
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        a, b = (Domain.of(make_facts(name, args.facts, seed), model.tokenizer, model.device) for name in ("A", "B"))
        for family, members in _FAMILIES.items():
            arms = [arm for arm in members if arm in args.arms]
            if not arms or time.monotonic() + slowest > until:
                continue
            torch.manual_seed(seed)
            learner = _learner(family, model, args, seed)
            options = {"every": args.every, "batch": args.batch, "seed": seed}
            rate = args.a_rate or _A_RATES[family]
            curve = learn(learner, a, rate, steps=args.a_steps, old=b, until=_A_LEARNT, **options)
            learnt, a_before = learner.state(), curve.b[-1]
            yield {"arm": f"{family}, A", "seed": seed, "a_before": a_before, "a_steps": curve.steps[-1]}
            if isinstance(learner, BankLearner):
                generator = torch.Generator().manual_seed(seed)
                learner.observe_background([a.batch(8, generator) for _ in range(_BACKGROUND)])
            for arm, rate in ((name, rate) for name in arms for rate in args.rates or _RATES[name]):
                if time.monotonic() + slowest > until:
                    break
                learner.restore(learnt)
                if isinstance(learner, BankLearner):
                    learner.choice = _BANK[arm]
                curve = learn(learner, b, rate, steps=args.steps, old=a, until=_B_LEARNT, **options)
                slowest = max(slowest, curve.seconds)
                row = {"arm": arm, "rate": rate, "seed": seed, "a_before": a_before, **_told(curve)}
                if isinstance(learner, BankLearner):
                    row["touched"] = round(learner.touched_LHM.float().mean().item(), 4)
                yield row
            learner.close()


def _learner(family: str, model: kvfold.Model, args: argparse.Namespace, seed: int) -> FullLearner:
    if family == "full":
        return FullLearner(model.hf.requires_grad_(True))
    model.hf.requires_grad_(False)
    if family == "lora":
        return LoraLearner(model.hf)
    text = " ".join(islice(prose(Random(seed)), args.slots))  # a sentence has more than one token
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"][: args.slots]
    config: Any = model.hf.config
    num_slots = config.num_hidden_layers * config.num_key_value_heads * args.slots
    return BankLearner(model.hf, ids, top=max(1, round(args.top * num_slots)), seed=seed)


def _told(curve: Curve) -> Row:
    return {
        "a_after": curve.a[-1], "b_after": curve.b[-1], "seconds": curve.seconds,
        "curve": {"steps": curve.steps, "a": curve.a, "b": curve.b},
    }  # fmt: skip


def _arms(text: str) -> list[str]:
    found = text.split(",")
    unknown = [arm for arm in found if arm not in _RATES]
    if unknown:
        raise argparse.ArgumentTypeError(f'no arm "{unknown[0]}"; arms: {", ".join(_RATES)}')
    return found


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
