"""Policy `full` in fp32 is token for token the unmodified model, however it is cut, paged, forked or batched."""

from __future__ import annotations

import pytest

from kvfold.models.loader import Model
from tests.engine.runs import NUM_NEW, Shared, full_session, prefill_and_generate, reference
from tests.tiny import FAMILIES, WINDOW, prompt

LENGTH = 61  # no multiple of any chunk, page or block below, and more than two sliding windows
MIXED = ("llama", "gemma3", "mistral_sliding", "gpt_neox")


def assert_all_stored(model: Model, stored_lens: list[list[int]]) -> None:
    """Sealed slots existed for the reader: all of the prompt, or its sliding window."""
    for layer, lens in zip(model.spec.layers, stored_lens, strict=True):
        least = LENGTH if layer.sliding_window is None else min(LENGTH, WINDOW - 1)
        assert all(length >= least for length in lens)


@pytest.mark.parametrize(
    ("family", "chunk_len"), [*((f, 7) for f in FAMILIES), *((f, n) for f in MIXED for n in (1, 32, 512))]
)
def test_any_chunk_length(shared: Shared, family: str, chunk_len: int) -> None:
    model = shared(family)
    with full_session(model, chunk_len=chunk_len) as session:
        session.extend(prompt(LENGTH))
        assert_all_stored(model, [session.cache.stored_lens(i) for i in range(model.spec.num_layers)])
        assert session.generate(max_new_tokens=NUM_NEW).token_ids == reference(family, LENGTH)


@pytest.mark.parametrize(("page_size", "open_len"), [(1, 1), (4, 3), (16, 5), (64, 40)])
@pytest.mark.parametrize("family", ["gemma3", "gpt_neox"])
def test_any_page_and_block(shared: Shared, family: str, page_size: int, open_len: int) -> None:
    with full_session(shared(family), page_size=page_size, open_len=open_len, chunk_len=20) as session:
        session.extend(prompt(LENGTH))
        assert session.generate(max_new_tokens=NUM_NEW).token_ids == reference(family, LENGTH)


@pytest.mark.parametrize("family", MIXED)
def test_pages_are_what_is_read(shared: Shared, family: str) -> None:
    model = shared(family)
    with full_session(model, open_len=4) as session:
        session.extend(prompt(LENGTH))
        model.arena.memory.zero_()
        assert session.generate(max_new_tokens=NUM_NEW).token_ids != reference(family, LENGTH)


@pytest.mark.parametrize("cut", [1, WINDOW, 40, LENGTH - 1])
@pytest.mark.parametrize("family", ["gemma3", "gpt_neox"])
def test_two_extends_are_one(shared: Shared, family: str, cut: int) -> None:
    ids = prompt(LENGTH)
    with full_session(shared(family), open_len=4, chunk_len=16) as session:
        session.extend(ids[:cut]).extend(ids[cut:])
        assert session.generate(max_new_tokens=NUM_NEW).token_ids == reference(family, LENGTH)


@pytest.mark.parametrize("family", MIXED)
def test_generating_in_parts(shared: Shared, family: str) -> None:
    with full_session(shared(family), open_len=4) as session:
        session.extend(prompt(LENGTH))
        found = [token for count in (1, 5, 10) for token in session.generate(max_new_tokens=count).token_ids]
        assert found == reference(family, LENGTH)


@pytest.mark.parametrize("family", MIXED)
def test_forks_at_every_stage(shared: Shared, family: str) -> None:
    ids = prompt(LENGTH)
    with full_session(shared(family), open_len=4, chunk_len=16) as session:
        session.extend(ids[:30])
        with session.fork() as other:
            other.extend(prompt(9, seed=7)).generate(max_new_tokens=7)
            session.extend(ids[30:])
        with session.fork() as second:
            first_part = second.generate(max_new_tokens=6).token_ids
            with second.fork() as third:
                assert first_part + third.generate(max_new_tokens=10).token_ids == reference(family, LENGTH)
            assert first_part + second.generate(max_new_tokens=10).token_ids == reference(family, LENGTH)
        assert session.generate(max_new_tokens=NUM_NEW).token_ids == reference(family, LENGTH)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch(shared: Shared, family: str) -> None:
    lengths = (LENGTH, 1, 30, WINDOW)
    prompts = [prompt(length) for length in lengths]
    found = prefill_and_generate(shared(family), ["full"] * 4, prompts, chunk_len=16)
    assert [tokens for tokens, _ in found] == [reference(family, length) for length in lengths]
