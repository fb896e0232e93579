"""`compress`: a cache for `model.generate` under policies that a transformers cache cannot run by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvfold import compress
from kvfold.errors import InputError, ModelError, PolicyError
from kvfold.models.attach import attach, is_attached, set_arena
from kvfold.models.cache import Cache
from kvfold.models.loader import Model
from kvfold.pages.arena import Arena
from kvfold.session import Session
from tests.tiny import build, prompt

CONTEXT, QUESTION = prompt(320, seed=4), prompt(40, seed=5)


def generated(hf: Any, ids: list[list[int]], cache: Any, **more: Any) -> list[list[int]]:
    inputs = torch.tensor(ids)
    found = hf.generate(inputs, past_key_values=cache, max_new_tokens=8, do_sample=False, **more)
    rows: list[list[int]] = found[:, inputs.shape[1] :].tolist()
    return rows


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "kvzip(chunk=64) + global + 4x + int4",
        "kvzip(chunk=64) + ada + 3x + fit(tokens=40)",
        "fastkv(rate=0.5, window=8) + snapkv(window=8) + 2x",
        "sentence(keydiff) + 3x",
        "keydiff + 3x",
        "h2o + 100tok",
        "keydiff + 100tok + recall(tokens=32)",
        "full + quest(tokens=64, skip_layers=0)",
    ],
)
@pytest.mark.parametrize("num_asked", [40, 5, 0])
def test_generate_goes_on_as_a_session_does(model: Model, policy: str, num_asked: int) -> None:
    """The question is read uncompressed behind the compressed context: tokens are those of `Session.ask`, also where
    the question fits into an open block, or `generate` is given the very tokens that were compressed."""
    if not num_asked and "quest" in policy:
        pytest.skip("one token is a decode step, in which quest selects pages")
    question = QUESTION[:num_asked]
    with Session(model, policy, template=None) as session:
        session.extend(CONTEXT[:-1])
        with session.fork() as branch:
            branch.extend([CONTEXT[-1], *question], compress=False)
            expected = branch.generate(max_new_tokens=8).token_ids
    cache = compress(model, CONTEXT, policy)
    assert generated(model.hf, [CONTEXT + question], copy.deepcopy(cache)) == [expected]
    assert generated(model.hf, [CONTEXT + question], cache) == [expected]  # the copy left it as it was
    assert cache.stats().logical_len == len(CONTEXT) + num_asked + 7


@pytest.mark.parametrize("policy", ["full", "kvzip(chunk=64) + global + 4x + int4", "h2o + 100tok"])
def test_turns_on_one_cache_are_those_of_a_session(model: Model, policy: str) -> None:
    """Each `generate` is given the whole conversation, as chat programs do; the cache reads what is new of it."""
    turns = [prompt(length, seed=length) for length in (40, 3, 33)]
    cache, ids = compress(model, CONTEXT, policy), list(CONTEXT)
    with Session(model, policy, template=None) as session:
        session.extend(CONTEXT[:-1])
        for turn in turns:
            session.extend([CONTEXT[-1], *turn] if ids == CONTEXT else turn, compress=False)
            ids += turn
            (found,) = generated(model.hf, [ids], cache)
            assert found == session.generate(max_new_tokens=8).token_ids
            ids += found
    assert cache.stats().logical_len == len(ids) - 1


def test_a_padded_batch_is_its_rows(model: Model) -> None:
    policy = "kvzip(chunk=64) + global + 3x"
    contexts = [prompt(290, seed=1), prompt(260, seed=2)]
    alone = [generated(model.hf, [ids + QUESTION], compress(model, ids, policy))[0] for ids in contexts]
    padded = [contexts[0], [0] * 30 + contexts[1]]
    mask = [[1] * 290, [0] * 30 + [1] * 260]
    cache = compress(model, {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}, policy)
    ids = [row + QUESTION for row in padded]
    whole = torch.tensor([row + [1] * len(QUESTION) for row in mask])
    assert generated(model.hf, ids, cache, attention_mask=whole) == alone


def test_a_model_that_was_not_attached_is(model: Model) -> None:
    hf = build("llama")
    set_arena(hf, Arena(16 << 20, superblock_bytes=4096))
    assert not is_attached(hf)
    with attach(hf):
        expected = generated(hf, [CONTEXT], Cache(hf, "keydiff + 2x"))
    assert not is_attached(hf)
    assert generated(hf, [CONTEXT], Cache(hf, "keydiff + 2x")) == expected and is_attached(hf)


def test_what_cannot_be_is_told(model: Model) -> None:
    with pytest.raises(PolicyError, match="evicts by sentences while decoding"):
        compress(model, CONTEXT, "sentence(keydiff) + 80tok")
    with pytest.raises(InputError, match=r"token ids \[batch, tokens\], at least two"):
        compress(model, torch.zeros(1, 0, dtype=torch.long), "full")
    with pytest.raises(InputError, match="padding must be on the left"):
        compress(model, {"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, "full")
    for bad, told in (
        ([[1, 2, 3], [1, 2]], "all of one length"),
        (torch.rand(1, 8), "not float32"),
        (torch.ones(1, 8, dtype=torch.bool), "not bool"),
        ([7], "at least two tokens"),
        (None, "no token ids"),
        ({"ids": [1]}, "no input_ids"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}, "with a mask alike"),
    ):
        with pytest.raises(InputError, match=told):
            compress(model, bad, "full")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="transformers module"):
        compress("smollm2-135m", CONTEXT, "full")
    with pytest.raises(InputError, match=r"page_size is 16\.0"):
        compress(model, CONTEXT, "full", page_size=16.0)  # type: ignore[arg-type]
    cache = compress(model, CONTEXT, "kvzip(chunk=64) + 3x")
    with pytest.raises(InputError, match="has read 319 tokens"):
        generated(model.hf, [CONTEXT[:50]], cache)
    cache.reset()
    with pytest.raises(PolicyError, match="replays the prompt"):
        generated(model.hf, [CONTEXT], cache)


def test_a_cache_of_another_model_is_refused(model: Model, shared: Callable[[str], Model]) -> None:
    other = shared("qwen3")
    with pytest.raises(ModelError, match="made for another model"):
        generated(other.hf, [CONTEXT + QUESTION], compress(model, CONTEXT, "keydiff + 3x"))
    with pytest.raises(ModelError, match="made for another model"):
        generated(other.hf, [CONTEXT], Cache(model, "keydiff + 3x"))


@pytest.mark.parametrize("inputs", ["some text", ["some text", "and more"]])
def test_text_is_told_to_be_tokenized(model: Model, inputs: Any) -> None:
    with pytest.raises(InputError, match="token ids, not text; tokenize it first"):
        compress(model, inputs, "full")


def test_a_short_row_of_a_batch_stays_whole(model: Model) -> None:
    """8x of 90 tokens are 12 slots; 4 sinks, 32 recent and the open block are 68."""
    rows = [prompt(900), prompt(90, seed=2)]
    ids = torch.tensor([[0] * 810 + rows[1], rows[0]])
    mask = torch.tensor([[0] * 810 + [1] * 90, [1] * 900])
    cache = compress(model, {"input_ids": ids, "attention_mask": mask}, "knorm + 8x")
    assert [round(cache.stats(row).mean_slots) for row in (0, 1)] == [89, 113 - 32]
    cache.reset()
