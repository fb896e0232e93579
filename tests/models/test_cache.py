"""The drop-in cache under `model.generate`: batches, padding, beams, samples, continuation, crops and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import cache as remembered
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.errors import InputError, OutOfPages, PolicyError
from kvfold.models.attach import arena_of, attach, set_arena
from kvfold.pages.arena import Arena
from tests.tiny import FAMILIES, VOCAB_SIZE, build, prompt, tokenizer

NUM_NEW = 12
PAGES = {"page_size": 4, "open_len": 5}


@remembered
def _built(family: str) -> Any:
    model = build(family)
    attach(model)
    set_arena(model, Arena(32 * 2**20, superblock_bytes=4096))
    return model


@pytest.fixture(params=FAMILIES)
def any_model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from _checked(_built(request.param))


@pytest.fixture
def llama() -> Iterator[Any]:
    yield from _checked(_built("llama"))


def _checked(model: Any) -> Iterator[Any]:
    yield model
    assert arena_of(model).used_bytes == 0


def batch(*lengths: int, seed: int = 3) -> dict[str, Tensor]:
    """Left-padded prompts of these lengths."""
    longest = max(lengths)
    rows = [[0] * (longest - n) + prompt(n, seed=seed + i) for i, n in enumerate(lengths)]
    mask = [[0] * (longest - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@torch.inference_mode()
def generated(model: Any, inputs: dict[str, Tensor], past: Any = None, **options: Any) -> Tensor:
    chosen = {"do_sample": False, "max_new_tokens": NUM_NEW, "pad_token_id": 0, **options}
    torch.manual_seed(11)
    found: Tensor = model.generate(**inputs, **chosen, **({} if past is None else {"past_key_values": past}))
    return found


def assert_same(model: Any, inputs: dict[str, Tensor], **options: Any) -> None:
    past = kvfold.Cache(model, "full", **PAGES)
    assert torch.equal(generated(model, inputs, past, **options), generated(model, inputs, **options))
    assert all(min(sequence.stored_lens(0)) > 0 for sequence in past.sequences)
    past.reset()


def test_padded_batch(any_model: Any) -> None:
    assert_same(any_model, batch(40, 7, 61, 1))


def test_single_prompt(any_model: Any) -> None:
    assert_same(any_model, batch(55))


def test_beams(any_model: Any) -> None:
    assert_same(any_model, batch(33, 12), num_beams=3, num_return_sequences=2)


def test_several_samples_of_one_prompt(llama: Any) -> None:
    options = {"do_sample": True, "num_return_sequences": 4, "top_k": 20, "temperature": 0.8}
    assert_same(llama, batch(33, 12), **options)


def test_prompt_in_chunks(llama: Any) -> None:
    assert_same(llama, batch(50), prefill_chunk_size=16)


REPEATED = {"input_ids": torch.tensor([prompt(20) * 2]), "attention_mask": torch.ones(1, 40, dtype=torch.int64)}


def test_prompt_lookup(any_model: Any) -> None:
    """Assisted generation runs its first drafts together with the prompt, which is sealed at once, and takes rejected
    ones back."""
    past = kvfold.Cache(any_model, "full", **PAGES)
    if any(layer.sliding_window is not None for layer in past.spec.layers):  # as transformers' own cache
        with pytest.raises(InputError, match=r"sliding window of \d+ tokens and has dropped what the 40 tokens"):
            generated(any_model, REPEATED, past, prompt_lookup_num_tokens=3)
    else:
        found = generated(any_model, REPEATED, past, prompt_lookup_num_tokens=3)
        assert torch.equal(found, generated(any_model, REPEATED))
    past.reset()


PROTECTED = "protect(sinks=2, recent=8)"


@pytest.mark.parametrize("policy", [f"knorm + 2x + {PROTECTED}", "int4", f"h2o + 24tok + int8 + {PROTECTED}"])
def test_prompt_lookup_over_compressed_caches(llama: Any, policy: str) -> None:
    """Slots of rejected drafts are gone from every head, and nothing else is."""
    past = kvfold.Cache(llama, policy, **PAGES)
    found = generated(llama, REPEATED, past, prompt_lookup_num_tokens=3)
    assert found.shape == (1, 40 + NUM_NEW)
    seen = past.get_seq_length()
    assert seen == past.sequences[0].logical_len <= 40 + NUM_NEW
    for layer in range(3):
        for head in range(2):
            positions = past.kept(layer, head)
            assert positions == sorted(set(positions)) and positions[-1] == seen - 1
    past.reset()


@torch.inference_mode()
def test_rejected_drafts_behind_a_prompt_leave_no_trace(llama: Any) -> None:
    ids = torch.tensor([prompt(50)])
    drafted, plain = kvfold.Cache(llama, "full", **PAGES), kvfold.Cache(llama, "full", **PAGES)
    llama(torch.cat((ids, torch.tensor([[7, 8, 9]])), 1), past_key_values=drafted)
    drafted.crop(-3)
    llama(ids, past_key_values=plain)
    assert drafted.get_seq_length() == 50 and drafted.kept(0, 0) == plain.kept(0, 0) == list(range(50))
    after = torch.tensor([prompt(9, seed=5)])
    torch.testing.assert_close(
        llama(after, past_key_values=drafted).logits, llama(after, past_key_values=plain).logits, atol=1e-5, rtol=1e-5
    )
    drafted.reset()
    plain.reset()


@torch.inference_mode()
def test_slots_that_share_scales_are_not_cropped(llama: Any) -> None:
    past = kvfold.Cache(llama, "kivi4")
    llama(torch.tensor([prompt(80)]), past_key_values=past)
    with pytest.raises(PolicyError, match="shares scales between neighbouring slots"):
        past.crop(-2)
    assert past.get_seq_length() == 80
    past.reset()


# Copies


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_copy_is_a_fork(llama: Any, copied: Any) -> None:
    """transformers' own recipe for a shared prefix; the arena is not copied."""
    policy = "knorm + 2x + protect(sinks=2, recent=4)"
    first = batch(60, 31)
    prefix = kvfold.Cache(llama, policy, **PAGES)
    with torch.inference_mode():
        llama(**first, past_key_values=prefix)
    before = arena_of(llama).used_bytes
    branch = copied(prefix)
    assert branch.arena is prefix.arena and branch.stats(1).slots == prefix.stats(1).slots
    assert arena_of(llama).used_bytes - before < prefix.resident_bytes / 2  # sealed pages are shared
    longer = {
        "input_ids": torch.cat((first["input_ids"], torch.tensor([[5, 6], [7, 8]])), 1),
        "attention_mask": torch.cat((first["attention_mask"], torch.ones(2, 2, dtype=torch.int64)), 1),
    }
    found = generated(llama, longer, branch)
    assert prefix.get_seq_length() == 60 and torch.equal(generated(llama, longer, copied(prefix)), found)
    branch.reset()
    assert torch.equal(generated(llama, longer, prefix), found)
    prefix.reset()


def test_nothing_that_lies_in_an_arena_is_pickled(llama: Any) -> None:
    past = kvfold.Cache(llama, "full", **PAGES)
    with torch.inference_mode():
        llama(torch.tensor([prompt(20)]), past_key_values=past)
    with pytest.raises(InputError, match=r"a kvfold\.Cache cannot be pickled"):
        pickle.dumps(past)
    with pytest.raises(InputError, match="neither copied nor pickled"):
        copy.deepcopy(past.arena)
    with kvfold.Session(kvfold.wrap(llama, tokenizer()), "full", template=None, **PAGES) as session:
        session.extend(prompt(30))
        with pytest.raises(InputError, match="a session cannot be pickled"):
            pickle.dumps(session)
        with copy.deepcopy(session) as branch:
            branch.extend(prompt(5, seed=9))
        assert session.stats().logical_len == 30
    past.reset()


# Telling


def test_a_cache_tells_what_it_holds(llama: Any) -> None:
    past = kvfold.Cache(llama, "knorm + 2x + protect(sinks=2, recent=4)", **PAGES)
    assert repr(past) == 'kvfold.Cache("knorm + 2x + protect(sinks=2, recent=4)", empty)'
    with pytest.raises(InputError, match="row 0 does not exist; the cache holds 0 rows"):
        past.stats()
    with torch.inference_mode():
        llama(**batch(60, 31), past_key_values=past)
    assert [past.stats(row).logical_len for row in (0, 1, -1)] == [60, 31, 31]
    assert len(past.kept(0, 0, row=1)) == past.stats(1).slots[0][0] <= 16
    assert "rows=2, tokens=60, resident=" in repr(past) and repr(past).endswith("x, dtype=float32)")
    past.reset()


@pytest.mark.parametrize("num_tokens", [10, 26, 27, 40, 50, 51])
def test_an_input_no_longer_than_the_cache_is_refused(any_model: Any, num_tokens: int) -> None:
    """transformers cuts the held tokens off the input; of a shorter input it sends none, some, or all of them."""
    past = kvfold.Cache(any_model, "full", **PAGES)
    generated(any_model, batch(40), past)
    with pytest.raises(InputError, match=r"has read 51 tokens and the input is no longer than that; give all of these"):
        generated(any_model, batch(num_tokens), past)
    assert past.get_seq_length() == 51
    past.reset()


def test_a_padded_batch_is_refused_for_what_it_is(llama: Any) -> None:
    past = kvfold.Cache(llama, "full", **PAGES)
    generated(llama, batch(40, 21), past)
    with pytest.raises(InputError, match="has read 51 tokens and the input is no longer"):
        generated(llama, batch(40, 21), past)
    past.reset()


def test_rows_for_beams_are_made_of_one(llama: Any) -> None:
    """A cache that was filled as one row serves several after batch_repeat_interleave."""
    inputs = batch(40)
    past = kvfold.compress(llama, inputs, "full", page_size=4, open_len=5)
    with pytest.raises(InputError, match=r"call cache\.batch_repeat_interleave\(3\) first"):
        generated(llama, inputs, past, num_beams=3)
    past.batch_repeat_interleave(3)
    assert torch.equal(generated(llama, inputs, past, num_beams=3), generated(llama, inputs, num_beams=3))
    past.reset()


@pytest.mark.parametrize("added", [3, 40])
def test_second_generate_continues(any_model: Any, added: int) -> None:
    first = batch(30, 9)
    past = kvfold.Cache(any_model, "full", **PAGES)
    answer = generated(any_model, first, past)
    assert torch.equal(answer, generated(any_model, first))
    more = batch(added, added, seed=8)
    longer = {
        "input_ids": torch.cat((answer, more["input_ids"]), 1),
        "attention_mask": torch.cat(
            (first["attention_mask"], torch.ones(2, NUM_NEW, dtype=torch.int64), more["attention_mask"]), 1
        ),
    }
    assert torch.equal(generated(any_model, longer, past), generated(any_model, longer))
    past.reset()


def test_rows_are_sequences_of_their_own(llama: Any) -> None:
    """A compressed batch gives what each row gives alone: padding is never stored nor counted."""
    policy = "knorm + 2x + protect(sinks=2, recent=4)"
    lengths = (60, 31, 44)
    together = kvfold.Cache(llama, policy, **PAGES)
    rows = generated(llama, batch(*lengths), together)[:, 60:]
    for i, length in enumerate(lengths):
        alone = kvfold.Cache(llama, policy, **PAGES)
        inputs = batch(length, seed=3 + i)
        assert torch.equal(generated(llama, inputs, alone)[0, length:], rows[i])
        assert alone.sequences[0].logical_len == together.sequences[i].logical_len == length + NUM_NEW - 1
        alone.reset()
    assert together.resident_bytes > 0 and together.get_seq_length() == 60 + NUM_NEW - 1
    together.reset()
    assert together.get_seq_length() == 0


def test_compressed_cache_equals_a_session(llama: Any) -> None:
    """The drop-in way and the runner share everything but the loop."""
    policy, ids = "snapkv(window=8) + ada + 2x + int8 + protect(sinks=2, recent=4)", prompt(90)
    past = kvfold.Cache(llama, policy, **PAGES)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 90, dtype=torch.int64)}
    tokens = generated(llama, inputs, past)[0, 90:].tolist()
    with kvfold.Session(kvfold.wrap(llama, tokenizer()), policy, template=None, **PAGES) as session:
        assert session.extend(ids).generate(max_new_tokens=NUM_NEW - 1).token_ids == tokens[:-1]
        assert session.cache.observed.num_bytes == past.sequences[0].observed.num_bytes
        for layer in range(3):
            for head in range(2):
                assert (
                    session.cache.positions(layer, head).tolist()
                    == (past.sequences[0].positions(layer, head).tolist()[:-1])
                )
    past.reset()


def test_crop_stops_at_the_last_forward(llama: Any) -> None:
    past = kvfold.Cache(llama, "full", **PAGES)
    ids = torch.tensor([prompt(30)])
    with torch.inference_mode():
        llama(ids[:, :20], past_key_values=past)
        llama(ids[:, 20:24], past_key_values=past)
        with pytest.raises(InputError, match="only the 4 tokens of the last forward"):
            past.crop(-5)
        past.crop(-3)
        with pytest.raises(InputError, match="only the 1 tokens of the last forward"):
            past.crop(-2)
        assert past.get_seq_length() == 21
        after = llama(ids[:, 21:], past_key_values=past).logits[0, -1]
        expected = llama(ids, use_cache=False).logits[0, -1]
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(InputError, match="negative number"):
        past.crop(5)
    past.reset()


def test_right_padding_is_refused(llama: Any) -> None:
    past = kvfold.Cache(llama, "full")
    inputs = batch(9, 5)
    wrong = {name: tensor.flip(-1) for name, tensor in inputs.items()}
    with pytest.raises(InputError, match="padding must be on the left"):
        llama(**wrong, past_key_values=past)
    with pytest.raises(InputError, match="every row needs a token"):
        llama(inputs["input_ids"], attention_mask=torch.tensor([[1] * 9, [0] * 9]), past_key_values=past)
    past.reset()


def test_other_batch_size_is_refused(llama: Any) -> None:
    past = kvfold.Cache(llama, "full")
    generated(llama, batch(9, 5), past)
    with pytest.raises(InputError, match=r"holds 2 row\(s\), the input 3; use a cache per batch"):
        llama(batch(4, 4, 4)["input_ids"], past_key_values=past)
    past.reset()


@pytest.mark.parametrize("num_tokens", [1, 30])
@pytest.mark.parametrize("policy", ["full", "h2o + 60tok", "expected + 60tok"])
def test_interrupted_forward_can_be_repeated(llama: Any, policy: str, num_tokens: int) -> None:
    ids = torch.randint(0, VOCAB_SIZE, (2, 90), generator=torch.Generator().manual_seed(2))
    pasts = [kvfold.Cache(llama, policy, **PAGES) for _ in range(2)]
    with torch.inference_mode():
        for past in pasts:
            llama(ids[:, :50], past_key_values=past)
        hook = llama.model.layers[1].mlp.register_forward_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            llama(ids[:, 50 : 50 + num_tokens], past_key_values=pasts[0])
        hook.remove()
        assert pasts[0].get_seq_length() == 50
        steps = [slice(50, 50 + num_tokens), slice(50 + num_tokens, 81), *(slice(i, i + 1) for i in range(81, 90))]
        first, second = (
            [llama(ids[:, step], past_key_values=past).logits for step in steps if step.stop > step.start]
            for past in pasts
        )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for past in pasts:
        past.reset()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_no_room_for_all_rows_holds_none() -> None:
    model = build()
    with attach(model):
        set_arena(model, Arena(3 * 4096, superblock_bytes=4096))
        past = kvfold.Cache(model, "full", page_size=4, open_len=4)
        with pytest.raises(OutOfPages):
            model(batch(4, 4, 4, 4)["input_ids"], past_key_values=past)
        assert past.sequences == [] and arena_of(model).used_bytes == 0


def test_memory_returns_with_the_last_reference(llama: Any) -> None:
    past = kvfold.Cache(llama, "full")
    generated(llama, batch(9, 5), past)
    assert arena_of(llama).used_bytes > 0
    del past
