"""How far does each policy move a model's next tokens, and in how many bytes?

    python -m benchmarks.error policy int4 'palu("bases.safetensors", bf16, rank=0.7)'

The first tokens of a text are read once into a cache of every policy; then each predicts the 31 tokens after them, fed
with the text itself. `KL` (nats) and `agreement` (share of tokens with the same most likely one) compare with the full
cache, `bits lost` is per token of the text; all are means over the lengths of --tokens. `bytes` are those held at the
last of these, over a bf16 cache's. The last line is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

import kvfold
from benchmarks.commands import argument_parser
from kvfold.bench.fidelity import PerToken, per_token
from kvfold.engine.runner import Runner
from kvfold.policy import Policy

FOLLOWING = 32  # one pass over an open block; the last is only predicted


def measure(model: kvfold.Model, policies: list[str], ids: list[int], lengths: list[int]) -> list[dict[str, object]]:
    """One row for each policy."""
    runner = Runner(model.hf, model.spec, model.arena, compile=False)
    found: list[list[PerToken]] = [[] for _ in policies]
    held: list[float] = []
    for length in lengths:
        sequences = [runner.new_sequence(Policy.parse(text)) for text in ("full", *policies)]
        runner.prefill_many(sequences, ids[:length])
        fed, after = ids[length : length + FOLLOWING - 1], ids[length + 1 : length + FOLLOWING]
        full, *others = (verified.logits_TV for verified in runner.verify(sequences, [fed] * len(sequences)))
        for row, logits_TV in zip(found, others, strict=True):
            row.append(per_token(full, logits_TV, after))
        held = [sequence.resident_bytes / model.spec.full_bytes(length) for sequence in sequences[1:]]
        for sequence in sequences:
            sequence.release()
    rows: list[dict[str, object]] = []
    for policy, parts, share in zip(policies, found, held, strict=True):
        mean = PerToken(*(torch.cat(part) for part in zip(*parts, strict=True))).summary()
        error = {"KL": mean.kl_nats, "agreement": mean.agreement, "bits lost": mean.bits_lost}
        rows.append({"policy": policy, **error, "bytes": share})
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("error policy", __doc__)
    parser.add_argument("policies", nargs="+", metavar="POLICY")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--text", type=Path, default=Path("kvfold/data/handbook.txt"))
    parser.add_argument("--tokens", default="300,500,800", help="lengths that are read")
    options = parser.parse_args(arguments)
    model = kvfold.load(options.model, dtype=options.dtype)
    lengths = [int(length) for length in options.tokens.split(",")]
    ids = model.tokenizer(options.text.read_text())["input_ids"]
    if len(ids) < max(lengths) + FOLLOWING:
        parser.error(f"the text has {len(ids)} tokens; give one of at least {max(lengths) + FOLLOWING}")
    rows = measure(model, options.policies, ids, lengths)
    for row in rows:
        print("  ".join(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    print(json.dumps({"tokens": lengths, "rows": rows}))
