"""Honest bytes: a run succeeds in an arena of exactly the reported peak, and fails cleanly with one superblock less."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from kvfold.errors import OutOfPages
from kvfold.models.attach import set_arena
from kvfold.models.loader import Model
from kvfold.pages.arena import Arena
from kvfold.session import Session
from tests.engine.runs import make_runner, make_sequence
from tests.tiny import prompt, ready

SUPERBLOCK = 4096
PLENTY = 16 * 2**20
POLICIES = (
    "full",
    "full + int4",
    "full + kivi2",
    "snapkv(window=8) + ada + 3x + int8",
    "knorm + global + 3x",
    "h2o + 60tok",
    "streaming + 60tok + between_chunks(chunk=32)",
)


@cache
def _model(family: str) -> Model:
    return ready(family)


@pytest.fixture(params=["llama", "gemma3"])
def roomy(request: pytest.FixtureRequest) -> Iterator[Model]:
    """A model whose arena the test may replace."""
    model = _model(request.param)
    set_arena(model.hf, Arena(PLENTY, superblock_bytes=SUPERBLOCK))
    yield model
    assert model.arena.used_bytes == 0


def run(model: Model, policy: str, capacity: int) -> tuple[list[int], int]:
    """Extend twice and generate in an arena of this capacity: tokens and peak."""
    set_arena(model.hf, Arena(capacity, superblock_bytes=SUPERBLOCK))
    with Session(model, policy, template=None, page_size=4, open_len=8) as session:
        session.extend(prompt(150)).extend(prompt(40, seed=2))
        return session.generate(max_new_tokens=28).token_ids, model.arena.peak_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_the_reported_peak_is_enough_and_least(roomy: Model, policy: str) -> None:
    """Heads that grow take an eighth more where there is room, so a run may fit into a little less than it took;
    the peak it reports there is what it cannot do without."""
    tokens, peak = run(roomy, policy, PLENTY)
    assert run(roomy, policy, peak) == (tokens, peak)
    least = peak
    with pytest.raises(OutOfPages):
        while True:
            smaller, least_so_far = run(roomy, policy, least - SUPERBLOCK)
            assert smaller == tokens and least_so_far <= least - SUPERBLOCK
            least = least_so_far
    assert roomy.arena.used_bytes == 0
    assert least >= peak * 7 // 8


def test_resident_bytes_are_what_the_arena_lent(roomy: Model) -> None:
    with Session(roomy, "full + int4", template=None) as session:
        session.extend(prompt(150)).generate(max_new_tokens=40)
        cache = session.cache
        outside = cache.observed.num_bytes + sum(
            segment.table_bytes + segment.state_bytes for segment in (*cache.segments, cache.tail)
        )
        assert session.stats().resident_bytes == roomy.arena.used_bytes + outside


@pytest.mark.parametrize("policy", ["knorm", "h2o", "h2o + int4", "h2o + ada + int2", "tova + int4", "expected + int8"])
def test_sizes_in_bytes_hold_what_is_observed_too(model: Model, policy: str) -> None:
    """Attention mass is four bytes a slot: half of what a slot of int2 takes here."""
    pages: dict[str, Any] = {"template": None, "page_size": 4, "open_len": 8}
    small = "protect(sinks=2, recent=4)"
    with Session(model, f"{policy} + 30%mem + {small}", **pages) as session:
        stats = session.extend(prompt(600)).stats()
        assert 0.26 < stats.resident_bytes / stats.full_bytes <= 0.3
    with Session(model, f"{policy} + 60KB + {small}", **pages) as session:
        session.extend(prompt(600)).generate(max_new_tokens=40)
        assert session.stats().resident_bytes <= 60_000


def test_full_arena_leaves_the_session_as_it_was(roomy: Model) -> None:
    """OutOfPages in a prompt, then in a decode step: what was there goes on."""
    ids = prompt(60)
    with Session(roomy, "full", template=None, page_size=4, open_len=8) as session:
        expected = session.extend(ids).generate(max_new_tokens=8).token_ids
    with Session(roomy, "full", template=None, page_size=4, open_len=8) as session:
        session.extend(ids)
        set_aside = roomy.arena.peak_bytes
    set_arena(roomy.hf, Arena(set_aside, superblock_bytes=SUPERBLOCK))
    with Session(roomy, "full", template=None, page_size=4, open_len=8) as session:
        session.extend(ids)
        before = session.stats()
        with pytest.raises(OutOfPages):
            session.extend(prompt(400), pin=True)
        assert session.stats() == before and session.token_ids == ids and session.cache.pinned == []
        assert session.generate(max_new_tokens=8).token_ids == expected
        with pytest.raises(OutOfPages):
            session.generate(max_new_tokens=400)
        assert session.token_ids[: len(ids) + 8] == ids + expected
        assert session.cache.committed_len + 1 == len(session.token_ids)  # the token that did not fit is pending


def test_a_cache_that_finds_no_room_holds_none(roomy: Model) -> None:
    set_arena(roomy.hf, Arena(SUPERBLOCK, superblock_bytes=SUPERBLOCK))
    with pytest.raises(OutOfPages):
        Session(roomy, "full", template=None)
    assert roomy.arena.used_bytes == 0


def test_fork_of_a_full_arena_changes_nothing(roomy: Model) -> None:
    with Session(roomy, "full", template=None) as session:
        session.extend(prompt(60))
        needed = roomy.arena.peak_bytes
    set_arena(roomy.hf, Arena(needed, superblock_bytes=SUPERBLOCK))
    with Session(roomy, "full", template=None) as session:
        session.extend(prompt(60))
        with pytest.raises(OutOfPages):
            session.fork()
        assert len(session.generate(max_new_tokens=4).token_ids) == 4


def test_forks_share_what_is_sealed(roomy: Model) -> None:
    runner = make_runner(roomy)
    sequence = make_sequence(runner, "full")
    runner.prefill([sequence], [prompt(200)])
    before = roomy.arena.used_bytes
    branch = sequence.fork()
    assert roomy.arena.used_bytes == before + branch.open.num_bytes
    branch.release()
    assert roomy.arena.used_bytes == before
    sequence.release()
