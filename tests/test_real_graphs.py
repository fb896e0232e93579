"""Captured, compiled and plain decode steps and the unmodified model say the same, on a real model, across seals.

Captured steps write greedily; the others are led along the same tokens, plain ones in one batch of all policies,
the unmodified model in one forward. So equal best tokens mean equal texts. fp32: the same tokens. bf16: a step
may differ only where the plain one was undecided (a margin under half a logit), and at most 2 % of the steps do.

    S steps   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.bench.haystack import prose
from kvfold.engine.runner import Runner
from kvfold.pages.sequence import SequenceCache
from kvfold.policy import Policy
from tests.real import load

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="captured steps need a GPU"),
]
NUM_TOKENS = 256
POLICIES = (
    "full",
    "snapkv + ada + 4x",
    "int4",
    "keydiff + 4x + int8",
    "streaming + 512tok",
    "streaming + 512tok + slot",
    "h2o + 512tok",
    "tova + 512tok",
)
EXACT = ("full", "snapkv + ada + 4x")  # in fp32; codes of others turn rounding into whole steps of a grid
COMPILED = {"float32": ("full",), "bfloat16": ("full", "int4")}  # a compilation takes up to half a minute

Texts = dict[str, list[int]]  # policy -> its tokens
Logits = dict[str, Tensor]  # policy -> [S, V], after the prompt and after each token


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_captured_and_compiled_steps_and_the_unmodified_model_agree(dtype: str) -> None:
    model = load("qwen2.5-coder-1.5b", dtype=dtype, device="cuda", memory="2GB")
    text = " ".join(islice(prose(Random(2)), 300))
    ids = model.tokenizer(text)["input_ids"][:1200]
    captured, texts = greedy(model, ids)
    plain = led(runner_for(model, "plain"), ids, texts)
    steps = runner_for(model, "compiled")
    compiled = {policy: led(steps, ids, {policy: texts[policy]})[policy] for policy in COMPILED[dtype]}
    unmodified = {"full": transformers_logits(model, ids, texts["full"])}
    for name, found in (("captured", captured), ("compiled", compiled), ("unmodified", unmodified)):
        for policy, found_SV in found.items():
            limit = 0.0 if dtype == "float32" and policy in EXACT else 0.02
            compare(f"{dtype} {policy} {name}", found_SV, plain[policy], limit)


def compare(what: str, found_SV: Tensor, plain_SV: Tensor, limit: float) -> None:
    differs_S = found_SV.argmax(-1) != plain_SV.argmax(-1)
    top_S2 = plain_SV.topk(2, dim=-1).values
    told = f"{what}: {int(differs_S.sum())} of {len(differs_S)} steps differ"
    print(told, f"largest difference {float((found_SV - plain_SV).abs().max()):.3g}")
    assert (top_S2[:, 0] - top_S2[:, 1])[differs_S].le(0.5).all(), told
    assert differs_S.float().mean() <= limit, told


def runner_for(model: kvfold.Model, mode: str) -> Runner:
    runner = Runner(model.hf, model.spec, model.arena, compile=mode == "compiled")
    assert runner.graphs is not None
    runner.graphs.forget()
    runner.graphs.enabled = mode != "plain"
    return runner


def read(runner: Runner, ids: Sequence[int], policies: Sequence[str]) -> tuple[list[SequenceCache], Tensor]:
    """The prompt under several policies, in one forward; logits [policies, V] after it."""
    sequences = [runner.new_sequence(Policy.parse(policy)) for policy in policies]
    return sequences, runner.prefill_many(sequences, ids)


def greedy(model: kvfold.Model, ids: Sequence[int]) -> tuple[Logits, Texts]:
    """One sequence after another: that is what a graph of one lane serves."""
    runner = runner_for(model, "captured")
    logits: Logits = {}
    texts: Texts = {}
    sequences, first = read(runner, ids, POLICIES)
    for policy, sequence, row_V in zip(POLICIES, sequences, first, strict=True):
        rows, tokens = [row_V], [int(row_V.argmax())]
        for _ in range(NUM_TOKENS):
            rows.append(runner.decode([sequence], tokens[-1:])[0])
            tokens.append(int(rows[-1].argmax()))
        logits[policy], texts[policy] = torch.stack(rows), tokens[:-1]
        sequence.release()
    return logits, texts


def led(runner: Runner, ids: Sequence[int], texts: Texts) -> Logits:
    """The policies of these texts together, each along its own."""
    sequences, first = read(runner, ids, list(texts))
    rows = [first, *(runner.decode(sequences, list(tokens)) for tokens in zip(*texts.values(), strict=True))]
    for sequence in sequences:
        sequence.release()
    return dict(zip(texts, torch.stack(rows, dim=1), strict=True))


def transformers_logits(model: kvfold.Model, ids: Sequence[int], tokens: Sequence[int]) -> Tensor:
    model.hf.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            out = model.hf(torch.tensor([[*ids, *tokens]], device=model.device), logits_to_keep=len(tokens) + 1)
    finally:
        model.hf.set_attn_implementation("kvfold")
    found_SV: Tensor = out.logits[0].float()
    return found_SV
