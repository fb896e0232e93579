"""What scorers are shown: the last queries over chunk borders, moments of queries before their rotation."""

from __future__ import annotations

import pytest
import torch

from kvfold.compression.view import NewSlots, build_view
from kvfold.score.base import Needs, View
from tests.attend.reference import part, rotated
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, rope, tiny_spec

SPEC = tiny_spec(num_heads=3, group=2)
SMALL = "protect(sinks=1, recent=2)"


def view_after(policy: str, needs: Needs, num_tokens: int, chunks: list[int]) -> View:
    """What a scorer would be shown of layer 1 after a prompt and five decode steps."""
    layers = random_layers(SPEC, num_tokens + 5)
    sequence = new_sequence(policy, SPEC, open_len=8)
    prefill(sequence, part(layers, 0, num_tokens), chunks)
    for at in range(num_tokens, num_tokens + 5):
        decode(sequence, layers, at)
    _, k, v = layers[1]
    return build_view(sequence, 1, NewSlots(k[:, num_tokens:], v[:, num_tokens:], num_tokens), needs)


@pytest.mark.parametrize("chunks", [[30], [28, 2], [1] * 30])
def test_the_last_queries_span_chunks_and_steps(chunks: list[int]) -> None:
    needs = Needs(last_queries=9)
    view = view_after(f"snapkv(window=9) + 30tok + {SMALL}", needs, 30, chunks)
    q = random_layers(SPEC, 35)[1][0]
    assert view.q_RGWD is not None and torch.equal(view.q_RGWD, q[:, 26:].unflatten(0, (3, 2)))
    assert view.q_position_RW is not None and view.q_position_RW.tolist() == [list(range(26, 35))] * 3


def test_a_short_prompt_has_fewer_queries() -> None:
    view = view_after(f"snapkv(window=9) + 30tok + {SMALL}", Needs(last_queries=9), 2, [2])
    assert view.q_position_RW is not None and view.q_position_RW.tolist() == [list(range(7))] * 3


def test_moments_are_those_of_queries_before_rope() -> None:
    """All tokens but the first four, over chunks and steps."""
    view = view_after(f"expected + 40tok + {SMALL}", Needs(query_stats=True), 30, [3, 20, 7])
    q = random_layers(SPEC, 35)[1][0]
    assert view.stats is not None
    for head, q_TD in enumerate(q):
        plain = rotated(rope(16), q_TD[4:], [-token for token in range(4, 35)])
        mean, cov = view.stats.mean_RGD[head // 2, head % 2], view.stats.cov_RGDD[head // 2, head % 2]
        torch.testing.assert_close(mean, plain.mean(0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(cov, plain.T.cov(correction=0), atol=1e-5, rtol=1e-4)


def test_stored_and_new_slots_stand_side_by_side() -> None:
    view = view_after("full", Needs(), 30, [30])
    _, k, v = random_layers(SPEC, 35)[1]
    assert torch.equal(view.k_RSD, k) and torch.equal(view.v_RSD, v) and view.valid_RS.all()
    assert view.position_RS.tolist() == [list(range(35))] * 3 and view.seen_R.tolist() == [35] * 3
    assert view.q_RGWD is None and view.mass_RS is None and view.stats is None
