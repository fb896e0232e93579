"""NACL: votes first, then a sample whose odds are those of softmax."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvfold.errors import PolicyError
from kvfold.score import NACL, View
from tests.pages.tiny import new_sequence, prefill, random_layers, stored_tokens, tiny_spec
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


@pytest.mark.parametrize(("protected", "voted"), [([], [2, 4, 0, 3]), ([1], [2, 4, 0]), ([1, 5], [2, 4])])
def test_what_is_protected_takes_no_votes(protected: list[int], voted: list[int]) -> None:
    """As the authors' code: sinks and recent slots are taken out, then votes and chance share what is left. Six slots,
    two of them proxies, all by votes: what is protected spends the size but no vote."""
    view = votes_view(VOTES, 2, slots_per_head=6)
    assert view.protected_RS is not None
    view.protected_RS[0, protected] = True
    score_S = NACL(proxies=2, share=0.0).score(view)[0]
    assert sorted((score_S > 1e3).nonzero().flatten().tolist()) == sorted([*voted, *protected, 6, 7])


def test_protected_and_pinned_slots_reach_the_score() -> None:
    """32 slots of 64: 4 proxies; with 12 protected and 4 pinned 12 are free, and half of these are voted on."""
    spec = tiny_spec(num_layers=1)
    sequence = new_sequence("nacl(proxies=4, share=0.5) + protect(sinks=4, recent=8) + 36tok", spec)
    sequence.pinned = [(20, 24)]
    seen: list[torch.Tensor] = []
    score = NACL.score

    def noted(self: NACL, view: View) -> torch.Tensor:
        assert view.protected_RS is not None
        seen.append(view.protected_RS[0].nonzero().flatten())
        return score(self, view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NACL, "score", noted)
        prefill(sequence, random_layers(spec, 64))
    assert seen[0].tolist() == [0, 1, 2, 3, 20, 21, 22, 23, *range(56, 64)]
    assert set(seen[0].tolist()) <= set(stored_tokens(sequence, 0, 0))


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
