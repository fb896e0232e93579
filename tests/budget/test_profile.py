"""profile: shares by measured needs, by hand; files that are whole and of this model; fingerprints by content.

H heads   S slots
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.budget import Budget, Profile
from kvfold.budget.base import Scores
from kvfold.budget.profile import FORMAT, MAX_BYTES, HeadProfile
from kvfold.errors import PolicyError
from kvfold.policy.policy import Policy
from tests.budget.scores import allocated, layers_of_scores
from tests.pages.tiny import new_sequence, prefill, random_layers, tiny_spec

INF = torch.inf
NEEDS = ((0.5, 0.1), (0.3, 0.1))


def written(path: Path, needs: tuple[tuple[float, ...], ...] = NEEDS, weights: str = "") -> Path:
    HeadProfile("tiny", weights, "by hand", needs).write(path)
    return path


def counts_of(profile: Profile, scores: list[Tensor], slots: int) -> list[list[int]]:
    counts = allocated(profile, scores, Budget(slots, len(scores)), len(scores) - 1)
    return [count_H.tolist() for count_H in counts]


def test_heads_share_by_need(tmp_path: Path) -> None:
    file = str(written(tmp_path / "heads.json"))
    scores = [torch.rand(2, 50), torch.rand(2, 50)]
    assert counts_of(Profile(file, floor=0.0), scores, 10) == [[20, 4], [12, 4]]
    assert counts_of(Profile(file, floor=0.8), scores, 10) == [[17, 7], [10, 6]]  # of 40: .5 .2 .3 .2 of 1.2


def test_protected_slots_come_first_and_short_heads_pass_on(tmp_path: Path) -> None:
    """40 slots, 10 protected in one head; 30 are free, of which the first head can take 5: 3 : 1 : 1 of 25 remain."""
    first, second = torch.full((2, 50), -INF), torch.rand(2, 50)
    first[0, :5], first[1] = 1.0, 1.0
    second[0, :10] = INF
    counts = counts_of(Profile(str(written(tmp_path / "heads.json")), floor=0.0), [first, second], 10)
    assert counts == [[5, 5], [25, 5]]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scores=layers_of_scores(), slots=st.integers(0, 6), seed=st.integers(0, 99))
def test_counts_keep_bounds_and_total_and_only_shrink(
    tmp_path: Path, scores: list[Tensor], slots: int, seed: int
) -> None:
    draw = torch.rand(len(scores), scores[0].shape[0], generator=torch.Generator().manual_seed(seed))
    needs = tuple(tuple(row) for row in (draw > 0.2).mul(draw).tolist())
    profile = Profile(str(written(tmp_path / "heads.json", needs)))
    budget = Budget(slots, len(scores))
    history = [allocated(profile, scores[: layer + 1], budget, layer) for layer in range(len(scores))]
    for before, after in pairwise(history):
        assert all((now_H <= then_H).all() for then_H, now_H in zip(before, after, strict=False))
    low, high = (
        int(sum(part.sum() for part in parts)) for parts in zip(*(Scores(s).bounds for s in scores), strict=True)
    )
    assert sum(int(count_H.sum()) for count_H in history[-1]) == max(low, min(slots * draw.numel(), high))
    for score_HS, count_H in zip(scores, history[-1], strict=True):
        protected_H, existing_H = Scores(score_HS).bounds
        assert (protected_H <= count_H).all() and (count_H <= existing_H).all()


def test_a_sequence_keeps_what_the_profile_says(tmp_path: Path) -> None:
    """56 tokens at 2x: 28, less an open block of 4; of 24 * 4 slots 20 are protected, 76 shared 5 : 1 : 3 : 1."""
    spec, file = tiny_spec(), written(tmp_path / "heads.json")
    sequence = new_sequence(f'knorm + profile(file="{file}", floor=0) + 2x + protect(sinks=2, recent=3)', spec)
    prefill(sequence, random_layers(spec, 56), [30, 26])
    assert [sequence.stored_lens(i) for i in range(2)] == [[43, 13], [28, 12]]


def test_fingerprints_know_the_content_not_the_name(tmp_path: Path) -> None:
    one, same = (written(tmp_path / name) for name in ("one.json", "same.json"))
    other = written(tmp_path / "other.json", ((0.5, 0.1), (0.3, 0.2)))
    prints = [Policy.parse(f'knorm + profile(file="{file}") + 4x').fingerprint for file in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    floor = Policy.parse(f'knorm + profile(file="{one}", floor=0.3) + 4x').fingerprint
    assert floor not in prints


def test_canonical_text_holds_the_content(tmp_path: Path) -> None:
    file = written(tmp_path / "heads.json")
    policy = Policy.parse(f'knorm + profile(file="{file}") + 4x')
    assert Policy.parse(str(policy)) == Policy.parse(policy.short) == policy
    written(file, ((0.5, 0.1), (0.3, 0.2)))
    with pytest.raises(PolicyError, match=r"its content is sha_[0-9a-f]{16}, not sha_[0-9a-f]{16}; measure it anew"):
        Policy.parse(str(policy))


def test_a_profile_of_other_weights_or_shape_is_refused(tmp_path: Path) -> None:
    spec = replace(tiny_spec(), digest=lambda: "ours")
    Profile(str(written(tmp_path / "ours.json", weights="ours"))).check(spec)
    for name, needs, weights in (
        ("weights", NEEDS, "theirs"),
        ("layers", NEEDS[:1], "ours"),
        ("heads", ((1.0,),) * 2, "ours"),
    ):
        with pytest.raises(PolicyError, match="was measured on tiny, other weights than those of tiny"):
            Profile(str(written(tmp_path / f"{name}.json", needs, weights))).check(spec)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"format": "kvfold-profile-1"}', "[" * 100_000),
        json.dumps({"format": "kvfold-profile-9", "model": "", "weights": "", "measured": "", "needs": [[1]]}),
        json.dumps({"format": FORMAT, "model": "", "weights": "", "measured": "", "needs": [[2.0]]}),
        json.dumps({"format": FORMAT, "model": "", "weights": "", "measured": "", "needs": [["nan"]]}),
    ],
)
def test_files_that_are_no_profile_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "heads.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(PolicyError, match=r"heads.json is no head profile of format kvfold-profile-1; measure one"):
        Policy.parse(f'knorm + profile(file="{path}") + 4x')


def test_files_that_are_missing_or_huge_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"none.json cannot be read \(No such file or directory\); measure one with"):
        Profile(str(tmp_path / "none.json"))
    path = tmp_path / "huge.json"
    path.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(PolicyError, match="has more than the 16777216 bytes of a profile"):
        Profile(str(path))
    with pytest.raises(PolicyError, match="profile needs argument file"):
        Policy.parse("knorm + profile + 4x")
