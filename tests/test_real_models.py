"""Real pretrained models: the identities and the bytes that everything else rests on."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
import torch

import kvfold
from kvfold.bench.haystack import prose
from kvfold.policy import Policy
from tests.real import load

pytestmark = pytest.mark.model


def greedy(model: kvfold.Model, ids: list[int], num_tokens: int) -> list[int]:
    """What the unmodified model says: transformers' own attention and cache."""
    model.hf.set_attn_implementation("sdpa")
    try:
        prompt = torch.tensor([ids], device=model.device)
        out = model.hf.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False
        )
    finally:
        model.hf.set_attn_implementation("kvfold")
    found: list[int] = out[0, len(ids) :].tolist()
    return found


@pytest.fixture(scope="module")
def text() -> str:
    return " ".join(islice(prose(Random(1)), 400))


def test_full_is_the_unmodified_model_token_for_token(smollm2: kvfold.Model, text: str) -> None:
    ids = smollm2.tokenizer(text)["input_ids"][:300]
    expected = greedy(smollm2, ids, 40)
    with kvfold.Session(smollm2, "full", template=None, chunk_len=128) as session:
        session.extend(ids)
        reply = session.generate(max_new_tokens=40)
        assert session.cache.stored_lens(0) == [332] * 3  # the prompt and one sealed open block: pages were read
    assert reply.token_ids == expected


@pytest.mark.slow
def test_full_is_the_unmodified_model_on_a_chat_prompt_of_a_larger_model(text: str) -> None:
    """Attention biases, six query heads per KV head and a chat template, in fp32 on whatever device there is."""
    model = load("qwen2.5-coder-1.5b", dtype="float32", memory="1GB")
    question = f"{text[:3000]}\n\nWrite a Python function that counts the sentences of this text, and explain it."
    ids = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    assert len(ids) > 500
    expected = greedy(model, ids, 64)
    with kvfold.Session(model, "full", template=None, chunk_len=256) as session:
        session.extend(ids)
        reply = session.generate(max_new_tokens=64)
        assert session.cache.stored_lens(0) == [len(ids) + 32] * 2  # the prompt and one sealed open block
    assert reply.token_ids == expected


def test_bytes_after_a_prompt_of_4000_tokens(text: str) -> None:
    model = load("smollm2-135m", device="cpu")  # auto: the cache is bf16
    ids = model.tokenizer(text)["input_ids"][:4000]
    assert len(ids) == 4000
    policies = ("snapkv + ada + 8x", "snapkv + ada + 8x + int4")
    sessions = [kvfold.Session(model, policy) for policy in policies]
    sessions[0].runner.prefill_many([session.cache for session in sessions], ids)
    plain, quantised = (session.stats() for session in sessions)
    assert plain.full_bytes == 4000 * 23_040
    assert plain.resident_bytes <= 0.135 * plain.full_bytes
    assert quantised.resident_bytes <= 0.052 * plain.full_bytes
    assert plain.mean_slots == 4000 / 8 - 32  # the open block is inside the target
    assert any(len(set(layer)) > 1 for layer in plain.slots)  # heads really differ in length
    for session in sessions:
        session.close()
    assert model.arena.used_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-1.5b"])
def test_bf16_differs_only_where_the_reference_is_undecided(name: str, text: str) -> None:
    """Teacher-forced along the reference: a differing step has a margin under half a logit; at most 2 % differ."""
    if not torch.cuda.is_available():
        pytest.skip("bf16 arithmetic is emulated on most CPUs; this runs on a GPU")
    model = load(name, dtype="bfloat16", device="cuda")
    ids = model.tokenizer(text)["input_ids"][:1000]
    expected = greedy(model, ids, 256)
    model.hf.set_attn_implementation("sdpa")
    with torch.inference_mode():
        reference = model.hf(torch.tensor([ids + expected], device="cuda")).logits[0, len(ids) - 1 : -1].float()
    model.hf.set_attn_implementation("kvfold")
    with kvfold.Session(model, Policy.parse("full"), template=None) as session:
        session.extend(ids)
        assert session._logits_V is not None
        rows = [session._logits_V]
        for token in expected[:-1]:
            rows.append(session.runner.decode([session.cache], [token])[0])
    differs = torch.stack(rows).argmax(-1) != reference.argmax(-1)
    top = reference.topk(2, dim=-1).values
    assert (top[:, 0] - top[:, 1])[differs].le(0.5).all()
    assert differs.float().mean() <= 0.02
