"""Scores of a second reading, from maxima that can be reduced by hand.

R rows   S slots   G query heads per KV head   D head dim   M hidden dims
"""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.core import LayerSpec
from kvfold.errors import PolicyError
from kvfold.policy import Policy
from kvfold.score import KVzip, KVzipPlus, Replay, View

MAXIMA = [[0.5, 0.1, 0.2, 0.0], [0.4, 0.3, 0.1, 0.6]]  # two query heads of one KV head, four slots
VALUES = [[1.0, 0.0], [0.0, 1.0], [3.0, 4.0], [1.0, 1.0]]
# Head 0 writes the first channel to both hidden dims, with norm 2; head 1 the second one to one of them, halved.
WO = [[[1.2, 1.6], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.5]]]


def replayed_view() -> View:
    position_RS = torch.arange(4).unsqueeze(0)
    v_RSD = torch.tensor([VALUES])
    return View(
        layer=0,
        num_layers=1,
        spec=LayerSpec(num_kv_heads=1, num_query_heads=2, head_dim=2, scale=1.0),
        num_heads=1,
        k_RSD=v_RSD,
        v_RSD=v_RSD,
        position_RS=position_RS,
        valid_RS=torch.ones_like(position_RS, dtype=torch.bool),
        seen_R=torch.tensor([4]),
        replay_RGS=torch.tensor([MAXIMA]),
        wo_HGDM=torch.tensor([WO]),
    )


def test_the_largest_weight_of_any_head_counts() -> None:
    score_RS = KVzip(sinks=0).score(replayed_view())
    torch.testing.assert_close(score_RS, torch.tensor([[0.5, 0.3, 0.2, 0.6]]))


def test_weights_count_by_the_value_behind_them() -> None:
    """Norms through head 0: 2, 0, 6, 2; through head 1: 0, .5, 2, .5. The maximum is taken after the product."""
    score_RS = KVzipPlus(sinks=0).score(replayed_view())
    torch.testing.assert_close(score_RS, torch.tensor([[1.0, 0.15, 1.2, 0.3]]))


@pytest.mark.parametrize("scorer", [KVzip(sinks=2), KVzipPlus(sinks=2)], ids=str)
def test_sinks_always_stay(scorer: KVzip | KVzipPlus) -> None:
    score_S = scorer.score(replayed_view())[0]
    assert score_S[:2].tolist() == [math.inf, math.inf] and score_S[2:].isfinite().all()


def test_they_say_which_reading_they_need() -> None:
    assert KVzip(chunk=100).needs.replay == Replay(100, 4)
    assert KVzip(surprise=1.5).needs.replay == Replay(surprise=1.5)
    assert KVzipPlus(sinks=1).needs.replay == Replay(2048, 1, by_hidden=True)
    assert not KVzip().needs.output and KVzipPlus().needs.output


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("kvzip(chunk=0) + 8x", r"chunk must be at least 1"),
        ("kvzip(surprise=-1) + 8x", r"surprise must be at least 0"),
        ("kvzip + 64tok", r"kvzip reads the prompt a second time, .* write prefill\(kvzip \+ 64tok\)"),
        ("prefill(kvzip + 8x) + decode(kvzip_plus + 64tok)", r"kvzip_plus reads the prompt a second time"),
        ("chunk(kvzip) + 64tok", r"chunk reads the prompt a second time"),
        ("kvzip + 8x + between_chunks", r"kvzip looks at the end of the prompt"),
    ],
)
def test_what_a_second_reading_cannot_do_is_refused(policy: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.parse(policy)


def test_a_bound_for_the_prompt_alone_is_fine() -> None:
    for policy in ("prefill(kvzip + 64tok)", "prefill(kvzip + 64tok) + decode(tova + 64tok)", "kvzip + global + 8x"):
        assert Policy.parse(policy).prefill.score == KVzip()
