"""Compactor: leverage, votes inside blocks and z-scores by hand; queries of a whole prompt in a model.

R rows   S slots   D head dim   T new queries
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold.errors import PolicyError
from kvfold.score import Compactor, Needs, View
from kvfold.score.compactor import block_votes, leverage, z_scores
from tests.engine.runs import kept, make_runner, make_sequence
from tests.score.views import SPEC, make_view
from tests.score.votes import votes_view
from tests.tiny import prompt, ready


def test_leverage_of_centred_keys() -> None:
    """Free keys 0, 0, 3 are -1, -1, 2 from their mean; X^T X + 0.01 = 6.01. The last slot takes no part."""
    view = replace(votes_view([1.0] * 4, 1), k_RSD=torch.tensor([[[0.0], [0.0], [3.0], [50.0]]]))
    free_RS = torch.tensor([[True, True, True, False]])
    found_S = leverage(view, free_RS)[0]
    torch.testing.assert_close(found_S, torch.tensor([1.0, 1.0, 4.0, 0.0]) / 6.01)


def test_leverage_is_of_keys_before_rope() -> None:
    assert SPEC.rope is not None
    view = make_view((40,), (40, 30), Needs())
    plain = replace(view, spec=replace(SPEC, rope=None))
    turned_RSD = SPEC.rope.rotate(view.k_RSD, view.position_RS)
    rotary = SPEC.rope.rotary_dim
    turned_RSD = torch.cat((turned_RSD[..., :rotary] * SPEC.rope.attention_scale, turned_RSD[..., rotary:]), dim=-1)
    found_RS = leverage(replace(view, k_RSD=turned_RSD), view.valid_RS)
    torch.testing.assert_close(found_RS, leverage(plain, view.valid_RS), rtol=1e-4, atol=1e-5)


def test_z_scores_over_the_heads_of_a_sequence() -> None:
    """Numbers 1, 2 | 3 of the first sequence, 5 | 9 of the second; 100 is not among them."""
    x_RS = torch.tensor([[1.0, 2.0], [3.0, 100.0], [5.0, 100.0], [9.0, 100.0]])
    z_RS = z_scores(x_RS, x_RS < 100, num_heads=2)
    half = 0.5**0.5
    torch.testing.assert_close(z_RS, torch.tensor([[-1.0, 0.0], [1.0, 0.0], [-half, 0.0], [half, 0.0]]))


def block_view(num_queries: int) -> View:
    view = votes_view([5.0, 1, 2, 1, 3, 1], 1)
    return replace(view, new_q_RGTD=torch.ones(1, 1, num_queries, 1))


def test_votes_inside_blocks_from_both_sides() -> None:
    """Blocks 1, 2, 3 and 4, 5: three queries share out 1:2:1, two share out 3:1; slot 0 takes no part."""
    view = block_view(6)
    assert view.new_q_RGTD is not None
    among_RS = view.position_RS >= 1
    vote_S = block_votes(view, view.new_q_RGTD, among_RS, first=1, block=3)[0]
    torch.testing.assert_close(vote_S, torch.tensor([0, 0.75, 1.5, 0.75, 1.5, 0.5]))


def test_a_pass_that_starts_inside_a_block_votes_on_its_own_tokens() -> None:
    view = block_view(4)
    assert view.new_q_RGTD is not None
    vote_S = block_votes(view, view.new_q_RGTD, view.position_RS >= 2, first=1, block=3)[0]
    torch.testing.assert_close(vote_S, torch.tensor([0, 0, 4 / 3, 2 / 3, 1.5, 0.5]))


def test_votes_are_not_scaled() -> None:
    view = block_view(6)
    assert view.new_q_RGTD is not None
    tame = replace(view, spec=replace(view.spec, scale=0.1))
    votes = [block_votes(v, view.new_q_RGTD, view.position_RS >= 1, 1, 3) for v in (view, tame)]
    assert torch.equal(*votes)


def test_the_blend_of_both() -> None:
    """Sinks 1, recent 1: slots 1 to 4 compete. Values double at slot 2, and neighbours are averaged by threes."""
    view = block_view(6)
    values = torch.tensor([1.0, 1, 2, 1, 1, 1]).view(1, 6, 1)
    view = replace(view, v_RSD=values)
    score_S = Compactor(sinks=1, recent=1, block=3, blend=0.5).score(view)[0]
    weighted = torch.tensor([0.75, 3.0, 0.75, 1.0])  # slot 4 alone is the second block
    pooled = torch.tensor([3.75, 4.5, 4.75, 1.75]) / 3
    torch.testing.assert_close(weighted[:2].sum() / 3, pooled[0])
    keys = view.k_RSD[0, 1:5, 0]
    lever = (keys - keys.mean()) ** 2
    expected = 0.5 * (lever - lever.mean()) / lever.std() + (pooled - pooled.mean()) / pooled.std()
    torch.testing.assert_close(score_S[1:5], expected, rtol=1e-4, atol=1e-5)
    assert score_S[[0, 5]].tolist() == [torch.inf] * 2


def test_the_blend_is_the_share_that_goes() -> None:
    view = replace(block_view(6), slots_per_head=2)
    given = Compactor(sinks=1, recent=1, block=3, blend=1 - 2 / 6).score(view)
    torch.testing.assert_close(Compactor(sinks=1, recent=1, block=3).score(view), given)


def test_without_queries_leverage_decides() -> None:
    view = block_view(0)
    score_S = Compactor(sinks=1, recent=1, blend=1.0).score(view)[0]
    free_RS = (view.position_RS >= 1) & (view.position_RS < 5)
    torch.testing.assert_close(score_S[1:5], z_scores(leverage(view, free_RS), free_RS, 1)[0, 1:5])


def test_chunks_of_a_prompt_do_not_matter() -> None:
    """Queries are held until the layer is through, whatever the chunks, also where several policies read at once."""
    model, found = ready("llama"), []
    for chunk_len in (16, 128):
        runner = make_runner(model, chunk_len)
        alone, shared, other = [
            make_sequence(runner, f"{score} + 2x") for score in ("compactor(block=24)",) * 2 + ("knorm",)
        ]
        runner.prefill([alone], [prompt(110)])
        runner.prefill_many([other, shared], prompt(110))
        found += [kept(alone), kept(shared)]
        runner.prefill([alone], [prompt(60, seed=2)])
        for sequence in (alone, shared, other):
            sequence.release()
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("name", ["sinks", "recent", "blend"])
def test_numbers_are_not_negative(name: str) -> None:
    with pytest.raises(PolicyError, match=f"{name} must be at least 0"):
        Compactor(**{name: -1})
