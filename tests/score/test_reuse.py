"""Layers that choose by the scores of the layer below: in a view, and in a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold.score import Chunk, KNorm, Needs
from kvfold.score.chunk import Reuse
from tests.engine.runs import kept, make_runner, make_sequence
from tests.score.views import make_view
from tests.tiny import prompt, ready

PROTECT = "protect(sinks=2, recent=4)"


def test_a_layer_between_takes_the_scores_of_the_one_that_leads() -> None:
    views = [make_view((30,), (30, 30), Needs(), seed=seed) for seed in range(5)]
    scorer = Chunk(KNorm(), size=3, reuse=2)
    reuse = Reuse(scorer)
    found = [reuse.score(view, place) for place, view in enumerate(views)]
    own = [scorer.score(view) for view in views]
    for place, leader in enumerate((0, 0, 2, 2, 4)):
        assert torch.equal(found[place], own[leader])


def test_scores_meet_by_position() -> None:
    """The leading head holds 0, 2, 5; the one above 2, 3 and padding: 2 takes its score, 3 comes last."""
    view = make_view((9,), (3, 3), Needs())
    leader = replace(view, position_RS=torch.tensor([[0, 2, 5], [0, 1, 8]]))
    valid_RS = torch.tensor([[True, True, False], [True, True, True]])
    above = replace(view, position_RS=torch.tensor([[2, 3, 0], [8, 1, 0]]), valid_RS=valid_RS)
    reuse = Reuse(Chunk(KNorm(), size=1, shared=False, reuse=2))
    led_RS = reuse.score(leader, 0)
    taken_RS = reuse.score(above, 1)
    assert taken_RS[0].tolist() == [led_RS[0, 1], torch.finfo(torch.float32).min, -torch.inf]
    assert taken_RS[1].tolist() == [led_RS[1, 2], led_RS[1, 1], led_RS[1, 0]]


def test_without_reuse_every_layer_is_scored() -> None:
    views = [make_view((30,), (30, 30), Needs(), seed=seed) for seed in range(2)]
    reuse = Reuse(KNorm())
    for place, view in enumerate(views):
        assert torch.equal(reuse.score(view, place), KNorm().score(view))


@pytest.mark.parametrize("budget", ["uniform", "ada"])
@pytest.mark.parametrize("score", ["chunk(snapkv(window=4), size=3, reuse=2)", "chunk(keydiff, shared=false, reuse=2)"])
def test_layers_of_a_model_keep_the_same_slots_in_pairs(score: str, budget: str) -> None:
    runner = make_runner(ready("llama"), chunk_len=32)
    policies = [
        f"{score} + {budget} + 3x + {PROTECT}",
        f"{score.replace('reuse=2', 'reuse=1')} + {budget} + 3x + {PROTECT}",
    ]
    paired, apart = [make_sequence(runner, policy) for policy in policies]
    runner.prefill_many([paired, apart], prompt(90))
    assert kept(paired)[0] == kept(paired)[1] == kept(apart)[0]
    assert kept(paired)[1] != kept(apart)[1]
    assert kept(paired)[2] != kept(paired)[1]
    alone = make_sequence(runner, policies[0])
    runner.prefill([alone], [prompt(90)])
    assert kept(alone) == kept(paired)
    runner.prefill([alone], [prompt(40, seed=2)])  # a second text: stored and new slots compete
    assert kept(alone)[0] == kept(alone)[1]
    for sequence in (paired, apart, alone):
        sequence.release()
