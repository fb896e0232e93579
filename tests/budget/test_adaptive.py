"""adaptive: as few slots as lose no more attention than allowed, by hand and against attention in plain PyTorch.

H KV heads   G query heads per KV head   W last queries   S slots
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.budget import Adaptive, Budget
from kvfold.budget.adaptive import lost_from
from kvfold.errors import PolicyError
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from tests.budget.scores import allocated, layers_of_scores
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, stored_tokens, tiny_spec

INF = torch.inf
SPEC = tiny_spec(num_layers=3, num_heads=2)
SMALL = "protect(sinks=2, recent=3)"
WINDOW = 8


def counts_of(allocator: Adaptive, lost: list[Tensor], slots: int) -> list[list[int]]:
    counts = allocated(allocator, lost, Budget(slots, len(lost)), len(lost) - 1)
    return [count_H.tolist() for count_H in counts]


def test_loss_adds_up_from_the_last_slot() -> None:
    """Order of scores: protected, slots 2, 0, 3; then what does not exist."""
    score_HS = torch.tensor([[0.5, INF, 0.7, 0.1, -INF]])
    attention_HS = torch.tensor([[0.25, 0.5, 0.125, 0.125, 0.0]])
    assert lost_from(score_HS, attention_HS).tolist() == [[INF, 0.5, 0.375, 0.125, -INF]]


def test_a_slot_stays_where_ending_before_it_would_lose_too_much() -> None:
    lost_HS = torch.tensor([[INF, 0.5, 0.375, 0.125, -INF], [0.9, 0.2, 0.1, 0.05, 0.01]])
    assert counts_of(Adaptive(loss=0.25), [lost_HS], 5) == [[3, 1]]
    assert counts_of(Adaptive(loss=0.1), [lost_HS], 5) == [[4, 2]]
    assert counts_of(Adaptive(loss=0.0), [lost_HS], 5) == [[4, 5]]
    assert counts_of(Adaptive(loss=0.95), [lost_HS], 5) == [[1, 0]]


def test_a_size_is_the_upper_bound_and_spent_on_the_largest_losses() -> None:
    lost_HS = torch.tensor([[INF, 0.5, 0.375, 0.125, -INF], [0.9, 0.2, 0.1, 0.05, 0.01]])
    assert counts_of(Adaptive(loss=0.1), [lost_HS], 2) == [[3, 1]]
    assert counts_of(Adaptive(loss=0.1), [lost_HS, lost_HS * 0 + 0.3], 1) == [[3, 1], [0, 0]]


@settings(deadline=None)
@given(layers_of_scores(), st.integers(0, 6))
def test_earlier_layers_only_shrink(lost: list[Tensor], slots: int) -> None:
    budget = Budget(slots, len(lost))
    history = [allocated(Adaptive(), lost[: layer + 1], budget, layer) for layer in range(len(lost))]
    for before, after in pairwise(history):
        assert all((now_H <= then_H).all() for then_H, now_H in zip(before, after, strict=False))


def attention(q_QTD: Tensor, k_HTD: Tensor) -> Tensor:
    """[H, S]: mean of the last queries' softmax over what they see, in plain PyTorch."""
    num_tokens, scale = k_HTD.shape[1], k_HTD.shape[2] ** -0.5
    q_HGWD = q_QTD.unflatten(0, (k_HTD.shape[0], -1))[:, :, -WINDOW:]
    seen_WS = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()[-WINDOW:]
    logit_HGWS = (q_HGWD @ k_HTD.unsqueeze(1).mT * scale).masked_fill(~seen_WS, -INF)
    weight_HS: Tensor = logit_HGWS.softmax(-1).mean((1, 2))
    return weight_HS


def lost(sequence: SequenceCache, layers: list[tuple[Tensor, Tensor, Tensor]]) -> list[float]:
    """The attention each head of each layer has lost."""
    found = []
    for i, (q_QTD, k_HTD, _) in enumerate(layers):
        for head, weight_S in enumerate(attention(q_QTD, k_HTD)):
            weight_S[stored_tokens(sequence, i, head)] = 0.0
            found.append(float(weight_S.sum()))
    return found


@pytest.mark.parametrize("score", ["knorm", "keydiff", f"snapkv(window={WINDOW})", "tova", "h2o", "random"])
def test_no_head_loses_more_than_allowed(score: str) -> None:
    layers = random_layers(SPEC, 80)
    lens = []
    for loss in (0.05, 0.3):
        sequence = new_sequence(f"{score} + adaptive(loss={loss}, window={WINDOW}) + {SMALL}", SPEC)
        prefill(sequence, layers, [50, 30])
        assert max(lost(sequence, layers)) <= loss + 1e-5
        assert min(lost(sequence, layers)) > loss / 4  # one slot more in any head would have been too much
        lens.append(sum(sum(sequence.stored_lens(i)) for i in range(SPEC.num_layers)))
    assert 0 < lens[1] < lens[0] < 80 * 6


def test_no_loss_keeps_all_and_a_size_bounds_what_a_small_loss_keeps() -> None:
    layers = random_layers(SPEC, 80)
    whole = new_sequence(f"knorm + adaptive(loss=0, window={WINDOW}) + {SMALL}", SPEC)
    prefill(whole, layers)
    assert [whole.stored_lens(i) for i in range(3)] == [[80, 80]] * 3
    bounded = new_sequence(f"knorm + adaptive(loss=0.01, window={WINDOW}) + 4x + {SMALL}", SPEC)
    prefill(bounded, layers)
    assert sum(sum(bounded.stored_lens(i)) for i in range(3)) == (80 // 4 - 4) * 6


def test_decoding_holds_the_loss_too() -> None:
    layers = random_layers(SPEC, 110)
    sequence = new_sequence(f"knorm + adaptive(loss=0.2, window={WINDOW}) + 60tok + every(8) + {SMALL}", SPEC)
    prefill(sequence, [(q[:, :80], k[:, :80], v[:, :80]) for q, k, v in layers])
    for at in range(80, 110):
        decode(sequence, layers, at)
    assert sequence.last_compressed_len > 80
    assert all(5 < len_ < 56 for i in range(3) for len_ in sequence.stored_lens(i))


def test_without_a_window_slots_of_higher_scores_stay() -> None:
    """Scores of a window's queries, so that they can be told in plain PyTorch: the mean over the group, not pooled."""
    layers, loss = random_layers(SPEC, 80), 0.015
    scorer = f"snapkv(window={WINDOW}, kernel=1)"
    sequence = new_sequence(f"{scorer} + adaptive(loss={loss}, window=none) + {SMALL}", SPEC)
    prefill(sequence, layers, [50, 30])
    must = {0, 1, *range(80 - WINDOW, 80)}
    counts = []
    for i, (q_QTD, k_HTD, _) in enumerate(layers):
        for head, weight_S in enumerate(attention(q_QTD, k_HTD)):
            expected = must | {slot for slot, weight in enumerate(weight_S.tolist()) if weight > loss}
            assert set(stored_tokens(sequence, i, head)) == expected
            counts.append(len(expected))
    assert len(must) < min(counts) < max(counts) < 80


def test_a_size_may_be_left_out() -> None:
    assert Policy.parse("keydiff + adaptive(loss=0.1)") == Policy.parse("keydiff + adaptive(loss=0.1) + 1x")
    assert Policy.parse("prefill(keydiff + adaptive)").decode.size is None
    with pytest.raises(PolicyError, match="budget adaptive has no effect"):
        Policy.parse("adaptive")


def test_bad_arguments() -> None:
    with pytest.raises(PolicyError, match=r"adaptive\(loss=1\): the loss is a share of a head's attention"):
        Adaptive(loss=1)
    with pytest.raises(PolicyError, match=r"adaptive\(window=0\): attention is that of the last queries, 1 or more"):
        Adaptive(window=0)
