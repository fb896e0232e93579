"""NACL: votes first, then a sample whose odds are those of softmax."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvfold.errors import PolicyError
from kvfold.score import NACL
from tests.score.votes import votes_view

VOTES = [3.0, 1, 6, 2, 4, 1, 2, 1]  # the last two are proxies: 19 votes in sight of the first, 20 of the second


def order(scorer: NACL, slots_per_head: int = 0) -> list[int]:
    score_S = scorer.score(votes_view(VOTES, 2, slots_per_head=slots_per_head))[0]
    found: list[int] = score_S.sort(descending=True, stable=True).indices.tolist()
    return found


def test_proxies_always_stay() -> None:
    assert NACL(proxies=2).score(votes_view(VOTES, 2))[0, 6:].tolist() == [torch.inf] * 2
    assert NACL(proxies=2).needs.window == 2


def test_without_chance_the_votes_decide() -> None:
    assert order(NACL(proxies=2, share=0.0), slots_per_head=8) == [6, 7, 2, 4, 0, 3, 1, 5]


@pytest.mark.parametrize(("share", "voted"), [(0.0, 4), (0.25, 3), (0.5, 2), (1.0, 0)])
def test_the_share_says_how_many_votes_count(share: float, voted: int) -> None:
    """Four slots beside the proxies: the best by votes are in under every seed, and no others."""
    kept = [set(order(NACL(2, share, seed), slots_per_head=6)[2:6]) for seed in range(60)]
    assert set.intersection(*kept) == set([2, 4, 0, 3][:voted])


def test_the_first_of_a_sample_is_drawn_by_softmax() -> None:
    """One vote of the first proxy, one of the second: s = v/19 + v/20; a head of its own for each seed."""
    chance = torch.softmax(torch.tensor(VOTES[:6]) * (1 / 19 + 1 / 20), dim=0)
    first = Counter(order(NACL(2, share=1.0, seed=seed))[2] for seed in range(3000))
    found = torch.tensor([first[slot] / 3000 for slot in range(6)])
    torch.testing.assert_close(found, chance, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"), [({"proxies": 0}, "proxies must be at least 1"), ({"share": 1.5}, "from 0 to 1")]
)
def test_bad_arguments(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        NACL(**arguments)  # type: ignore[arg-type]
