"""Scorers that look at positions alone: recent, streaming, random, full."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.budget import Budget, Uniform, select_top
from kvfold.errors import PolicyError
from kvfold.score import Full, Needs, Random, Recent, Scorer, Streaming, View
from tests.budget.scores import allocated
from tests.score.views import make_view


def positions_view(position_S: Tensor, seen: int) -> View:
    """One sequence whose two heads hold the same slots."""
    view = replace(make_view((1,), (1, 1), Needs()), seen_R=torch.tensor([seen, seen]))
    position_RS = position_S.expand(2, -1)
    slots_RSD = torch.zeros(*position_RS.shape, 8)
    valid_RS = torch.ones_like(position_RS, dtype=torch.bool)
    return replace(view, k_RSD=slots_RSD, v_RSD=slots_RSD, position_RS=position_RS, valid_RS=valid_RS)


def step(scorer: Scorer, position_S: Tensor, seen: int, slots: int) -> Tensor:
    """Positions that stay when the cache is cut to `slots` after `seen` tokens."""
    score_RS = scorer.score(positions_view(position_S, seen))
    (count_H,) = allocated(Uniform(), [score_RS], Budget(slots, 1), 0)
    return position_S[select_top(score_RS, count_H)[0]]


def test_streaming_trace() -> None:
    held = torch.arange(5)
    trace = []
    for seen in (5, 6, 7, 8):
        held = step(Streaming(sinks=2), torch.cat((held[held < seen - 1], torch.tensor([seen - 1]))), seen, 5)
        trace.append((held + 1).tolist())
    assert trace == [[1, 2, 3, 4, 5], [1, 2, 4, 5, 6], [1, 2, 5, 6, 7], [1, 2, 6, 7, 8]]


def test_streaming_memory_is_flat_over_a_long_stream() -> None:
    held = torch.empty(0, dtype=torch.int64)
    for seen in range(1000, 100_001, 1000):
        held = step(Streaming(sinks=4), torch.cat((held, torch.arange(seen - 1000, seen))), seen, 4 + 2048)
    assert held.tolist() == [0, 1, 2, 3, *range(100_000 - 2048, 100_000)]


def test_streaming_keeps_its_sinks_even_beyond_the_size() -> None:
    assert step(Streaming(sinks=4), torch.arange(10), 10, slots=2).tolist() == [0, 1, 2, 3]


def test_recent_is_a_window() -> None:
    assert step(Recent(), torch.arange(10), 10, slots=3).tolist() == [7, 8, 9]


def test_recent_tells_neighbours_apart_far_into_a_stream() -> None:
    start = 2**30
    held = step(Recent(), torch.arange(start, start + 8), start + 8, slots=3)
    assert (held - start).tolist() == [5, 6, 7]


def test_position_scorers_may_run_between_chunks() -> None:
    assert Recent().default_prefill_trigger == Streaming().default_prefill_trigger == "between_chunks"


def test_full_keeps_everything() -> None:
    assert Full.keeps_all
    assert step(Full(), torch.arange(10), 10, slots=1).tolist() == list(range(10))


def test_random_spreads_evenly_and_differs_by_head_layer_and_seed() -> None:
    view = positions_view(torch.arange(4096), 4096)
    score_RS = Random().score(view)
    assert abs(float(score_RS.mean()) - 0.5) < 0.02
    assert score_RS.min() >= 0 and score_RS.max() < 1
    counts = torch.histc(score_RS, bins=16, min=0, max=1)
    assert (counts - 512).abs().max() < 5 * 512**0.5
    others = [Random(seed=1).score(view), Random().score(replace(view, layer=2))]
    assert not torch.equal(score_RS[0], score_RS[1])
    for other_RS in others:
        together = torch.stack((score_RS.flatten(), other_RS.flatten()))
        assert abs(float(together.corrcoef()[0, 1])) < 0.05


def test_random_scores_a_slot_the_same_after_others_have_gone() -> None:
    every_S = Random().score(positions_view(torch.arange(100), 100))[0]
    some = torch.tensor([3, 17, 60, 99])
    assert torch.equal(Random().score(positions_view(some, 500))[0], every_S[some])


def test_random_is_integer_arithmetic_that_no_device_can_change() -> None:
    def mix(x: int) -> int:
        x = (x + 0x9E3779B9) % 2**32
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    def by_hand(seed: int, layer: int, head: int, position: int) -> int:
        return mix(mix(mix(mix(mix(seed)) ^ layer) ^ head) ^ position) >> 8

    score_RS = Random(seed=3).score(positions_view(torch.arange(5), 5))
    expected = [[by_hand(3, 1, head, position) for position in range(5)] for head in range(2)]
    assert (score_RS * 2**24).long().tolist() == expected


def test_negative_sinks_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"streaming\(sinks=-1\): sinks must be at least 0"):
        Streaming(sinks=-1)
