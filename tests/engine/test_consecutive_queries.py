"""Scores look at the last queries of a conversation: those they are shown are of the positions they are told.

A turn may be shorter than the window, and what came before it may have been read without compression, or decoded
without anybody watching. Queries of layer 0 depend on the token and its position alone, so each can be told.

    Q query heads   T tokens   D head dim   W queries of the window
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvfold.compression import view as views
from kvfold.compression.view import NewSlots
from kvfold.models.loader import Model
from kvfold.pages.observer_state import LayerObserverState
from kvfold.score.base import Needs, View
from kvfold.session import Session
from tests.engine.runs import make_runner, make_sequence
from tests.tiny import build, prompt

SMALL = "protect(sinks=2, recent=4)"
WINDOWED = [
    f"snapkv(window=16) + 2x + {SMALL}",
    f"keydiff + adaptive(window=16) + 2x + {SMALL}",
    f"keydiff + 2x + {SMALL} + fit(queries=prompt, tokens=16)",
    f"keydiff + 2x + {SMALL} + fastkv(window=16)",
    f"tova + 60tok + {SMALL}",
    f"prefill(snapkv(window=16) + 60tok) + decode(tova + 60tok) + {SMALL}",
]
Shown = list[tuple[list[int], Tensor]]  # positions that were told, and the queries [Q, W, D]


@contextmanager
def watched() -> Iterator[Shown]:
    """What layer 0 is shown of queries."""
    shown: Shown = []
    observe = views._fill_observations

    def watching(view: View, side: LayerObserverState, new: NewSlots, needs: Needs) -> None:
        observe(view, side, new, needs)
        if view.layer == 0 and view.q_RGWD is not None and view.q_position_RW is not None:
            shown.append((view.q_position_RW[0].tolist(), view.q_RGWD.flatten(0, 1).clone()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "_fill_observations", watching)
        yield shown


@torch.inference_mode()
def true_queries(ids: list[int]) -> Tensor:
    """[Q, T, D] of layer 0."""
    hf = build("llama")
    layer = hf.model.layers[0]
    hidden = layer.input_layernorm(hf.model.embed_tokens(torch.tensor([ids])))
    q = layer.self_attn.q_proj(hidden).unflatten(-1, (-1, 16)).transpose(1, 2)
    turned, _ = apply_rotary_pos_emb(q, q, *hf.model.rotary_emb(hidden, torch.arange(len(ids))[None]))
    found: Tensor = turned[0]
    return found


def check(shown: Shown, ids: list[int]) -> None:
    true_QTD = true_queries(ids)
    assert shown
    for positions, q_QWD in shown:
        assert positions == list(range(positions[0], positions[0] + len(positions)))
        torch.testing.assert_close(q_QWD, true_QTD[:, positions], atol=1e-4, rtol=1e-4)


def small_session(model: Model, policy: str) -> Session:
    return Session(model, policy, template=None, page_size=4, open_len=8)


@pytest.mark.parametrize("policy", WINDOWED)
def test_short_turns_of_a_conversation(model: Model, policy: str) -> None:
    """The first turn is long; then come openings of replies, replies, and turns shorter than the window."""
    with small_session(model, policy) as session, watched() as shown:
        session.extend(prompt(150))
        for turn in range(3):
            session.extend(prompt(12, seed=turn + 2), compress=False)
            session.generate(max_new_tokens=20)
            session.extend(prompt(5, seed=turn + 7))
        check(shown, session.token_ids)
        assert shown[-1][0][-1] == len(session.token_ids) - 1


@pytest.mark.parametrize("policy", WINDOWED[:1] + WINDOWED[4:])
@pytest.mark.parametrize("options", [{"speculate": 4}, {"stop": ["~~", "q", "e"]}])
def test_drafts_leave_no_queries_behind(model: Model, policy: str, options: dict[str, Any]) -> None:
    with small_session(model, policy) as session, watched() as shown:
        session.extend(prompt(10) * 12)
        for turn in range(3):
            session.extend(prompt(3, seed=turn + 2), compress=False)
            session.generate(max_new_tokens=30, **options)
            session.extend(prompt(5, seed=turn + 7))
        check(shown, session.token_ids)


@pytest.mark.parametrize("policy", WINDOWED[:1] + WINDOWED[4:])
def test_forks_and_files(model: Model, policy: str, tmp_path: Path) -> None:
    with small_session(model, policy) as session:
        session.extend(prompt(100))
        session.extend(prompt(6, seed=2), compress=False)
        session.generate(max_new_tokens=20)
        session.extend(prompt(3, seed=3), compress=False)
        session.save(tmp_path / "file")
        with session.fork() as branch, Session.load(model, tmp_path / "file") as loaded:
            for one in (session, branch, loaded):
                with watched() as shown:
                    one.extend(prompt(5, seed=4))
                    one.generate(max_new_tokens=20)
                    one.extend(prompt(4, seed=5))
                    check(shown, one.token_ids)


def test_sequences_of_a_batch(model: Model) -> None:
    """Rows that were decoded between two prompts stand beside one that was not."""
    runner = make_runner(model)
    sequences = [make_sequence(runner, WINDOWED[0]) for _ in range(2)]
    tokens = [prompt(80), prompt(60, seed=2)]
    try:
        runner.prefill(sequences, tokens)
        more = [prompt(6, seed=3), prompt(7, seed=4)]
        runner.prefill(sequences, more, compress=False)
        runner.decode(sequences[:1], [5])
        last = [prompt(4, seed=5), prompt(3, seed=6)]
        with watched() as shown:
            runner.prefill(sequences, last)
        ids = [[*tokens[0], *more[0], 5, *last[0]], [*tokens[1], *more[1], *last[1]]]
        for row, whole in enumerate(ids):
            check(shown[row : row + 1], whole)
        assert [len(positions) for positions, _ in shown] == [4, 10]
    finally:
        for sequence in sequences:
            sequence.release()


def test_moments_are_of_the_same_queries(model: Model) -> None:
    """A reply that nobody watched ends the run that moments are of, as it ends that of the last queries."""
    policy = f"expected + 2x + {SMALL}"
    found = []
    for opening in (prompt(12, seed=2), prompt(12, seed=9)):
        with small_session(model, policy) as session:
            session.extend(prompt(100))
            session.extend(opening, compress=False)
            for token in prompt(20, seed=4):
                session.runner.decode([session.cache], [token])
            session.extend(prompt(30, seed=3), compress=False)
            moments = session.cache.observed.layers[0].moments
            assert moments is not None
            found.append((moments.count, moments.sum_QD))
    assert found[0][0] == found[1][0] == 30
    torch.testing.assert_close(found[0][1], found[1][1])


def test_drafts_that_stand_behind_a_seal(model: Model) -> None:
    """The block seals while drafts are open: their queries are told at their own positions, and go when they go."""
    runner = make_runner(model)
    sequence = make_sequence(runner, f"snapkv(window=4) + 30tok + {SMALL}")
    ids, drafts = prompt(60), prompt(4, seed=5)
    try:
        runner.prefill([sequence], [ids[:40]])
        for token in ids[40:46]:
            runner.decode([sequence], [token])
        with watched() as shown:
            for token in drafts:
                runner.decode([sequence], [token], commit=[False])
        check(shown, [*ids[:46], *drafts])
        assert shown[0][0] == [44, 45, 46, 47]
        sequence.open.rollback()
        with watched() as shown:
            for token in ids[46:]:
                runner.decode([sequence], [token])
        check(shown, ids)
    finally:
        sequence.release()
