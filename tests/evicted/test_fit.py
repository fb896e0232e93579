"""`fit` against the closed forms written out, on heads whose answer is known, and on queries it was not shown.

N queries   S slots   K of them kept   D head dim
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.core import LayerSpec
from kvfold.errors import PolicyError
from kvfold.evicted import CalibrationTargets, Fit, KeptSlots, fit, least_squares
from kvfold.evicted.fit import batches, targets_of
from kvfold.evicted.least_squares import boxed_ridge, ridge
from kvfold.policy import Policy
from kvfold.score.base import Replay, View

DIM, SCALE = 16, 0.25


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def answers(q_ND: Tensor, k_SD: Tensor, v_SD: Tensor, bias_S: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    score_NS = q_ND @ k_SD.T * SCALE + bias_S
    return score_NS.softmax(-1) @ v_SD, score_NS.logsumexp(-1)


def asked_of(q_ND: Tensor, k_SD: Tensor, v_SD: Tensor, bias_S: Tensor | float = 0.0) -> CalibrationTargets:
    out_ND, lse_N = answers(q_ND, k_SD, v_SD, bias_S)
    return CalibrationTargets(q_ND[None], out_ND[None], lse_N[None], torch.ones(1, len(q_ND)), SCALE)


def kept(k_SD: Tensor, v_SD: Tensor, num_sealed: int = 0) -> KeptSlots:
    return KeptSlots(k_SD, v_SD, torch.zeros(len(k_SD)), torch.arange(len(k_SD)), num_sealed)


def test_of_equal_keys_one_stands_for_all() -> None:
    """Keys twice, values different: the bias is ln 2 and the value the mean, whatever is asked."""
    k_KD, v_KD, other_KD = draw(5, DIM), draw(5, DIM, seed=1), draw(5, DIM, seed=2)
    q_ND = draw(400, DIM, seed=3)
    target = asked_of(q_ND, torch.cat((k_KD, k_KD)), torch.cat((v_KD, other_KD)))
    [found] = Fit(ridge=1e-9).refit(target, [kept(k_KD, v_KD)])
    torch.testing.assert_close(found.bias_S, torch.full((5,), 2.0).log(), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.v_SD, (v_KD + other_KD) / 2, atol=1e-3, rtol=1e-3)


def test_nothing_evicted_changes_nothing() -> None:
    k_SD, v_SD = draw(12, DIM), draw(12, DIM, seed=1)
    [found] = Fit().refit(asked_of(draw(50, DIM, seed=2), k_SD, v_SD), [kept(k_SD, v_SD)])
    torch.testing.assert_close(found.bias_S, torch.zeros(12), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.v_SD, v_SD, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_queries", [12, 300], ids=["fewer queries than slots", "more"])
def test_is_the_two_ridge_regressions(num_queries: int) -> None:
    k_SD, v_SD, q_ND = draw(60, DIM).double(), draw(60, DIM, seed=1).double(), draw(num_queries, DIM, seed=2).double()
    out_ND, lse_N = answers(q_ND, k_SD, v_SD)
    k_KD, v_KD, strength, count_N = k_SD[::3], v_SD[::3], 0.3, draw(num_queries, seed=3).sigmoid().double()
    count_N1 = count_N.unsqueeze(-1)
    x_NK = torch.exp(q_ND @ k_KD.T * SCALE - lse_N.unsqueeze(-1))
    weight_K = 1 + _plain_ridge(count_N1 * x_NK, count_N1 * (1 - x_NK.sum(-1, keepdim=True)), strength).squeeze(-1)
    p_NK = (q_ND @ k_KD.T * SCALE + weight_K.log()).softmax(-1)
    expected_KD = v_KD + _plain_ridge(count_N1 * p_NK, count_N1 * (out_ND - p_NK @ v_KD), strength)
    assert weight_K.log().abs().max() < 20  # the box cuts nothing
    q_1ND, out_1ND, lse_1N, count_1N = (column.float().unsqueeze(0) for column in (q_ND, out_ND, lse_N, count_N))
    single = CalibrationTargets(q_1ND, out_1ND, lse_1N, count_1N, SCALE)
    [found] = Fit(ridge=strength, limit=20.0).refit(single, [kept(k_KD.float(), v_KD.float())])
    torch.testing.assert_close(found.bias_S, weight_K.log().float(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.v_SD, expected_KD.float(), atol=1e-3, rtol=1e-3)


def _plain_ridge(a_NS: Tensor, target_NX: Tensor, strength: float) -> Tensor:
    gram_SS = a_NS.T @ a_NS
    penalty_SS = strength * gram_SS.trace() / len(gram_SS) * torch.eye(len(gram_SS), dtype=gram_SS.dtype)
    found: Tensor = torch.linalg.solve(gram_SS + penalty_SS, a_NS.T @ target_NX)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_queries", [40, 400])
def test_answers_queries_it_was_not_shown(seed: int, num_queries: int) -> None:
    """Clustered keys, an eighth of them kept: output and mass are nearer than with the rest dropped."""
    centre_CD = draw(12, DIM, seed=seed) * 2
    k_SD = centre_CD.repeat(16, 1) + 0.5 * draw(192, DIM, seed=seed + 10)
    v_SD, q_ND = draw(192, DIM, seed=seed + 20), draw(num_queries, DIM, seed=seed + 30)
    held_out_ND = draw(500, DIM, seed=seed + 40)
    out_ND, lse_N = answers(held_out_ND, k_SD, v_SD)
    k_KD, v_KD = k_SD[:24], v_SD[:24]
    [found] = Fit().refit(asked_of(q_ND, k_SD, v_SD), [kept(k_KD, v_KD)])
    fitted, dropped = answers(held_out_ND, k_KD, found.v_SD, found.bias_S), answers(held_out_ND, k_KD, v_KD)
    assert (fitted[0] - out_ND).norm() < 0.7 * (dropped[0] - out_ND).norm()
    assert (fitted[1] - lse_N).abs().mean() < 0.3 * (dropped[1] - lse_N).abs().mean()


def test_a_query_that_looked_elsewhere_asks_for_nothing() -> None:
    """Half of the queries want other values, but had their answer from what is not in the cache."""
    k_SD, v_SD, other_SD, q_ND = draw(12, DIM), draw(12, DIM, seed=1), draw(12, DIM, seed=2), draw(300, DIM, seed=3)
    near, far = asked_of(q_ND, k_SD, v_SD), asked_of(q_ND, k_SD, other_SD, bias_S=1.0)
    columns = zip(*((one.q_HND, one.out_HND, one.lse_HN, one.share_HN) for one in (near, far)), strict=True)
    q_1ND, out_1ND, lse_1N, share_1N = (torch.cat(column, dim=1) for column in columns)
    both = CalibrationTargets(q_1ND, out_1ND, lse_1N, share_1N, SCALE)
    [blurred], both.share_HN[:, 300:] = Fit().refit(both, [kept(k_SD, v_SD)]), 0.0
    [found] = Fit().refit(both, [kept(k_SD, v_SD)])
    torch.testing.assert_close((found.v_SD, found.bias_S), (v_SD, torch.zeros(12)), atol=1e-4, rtol=0)
    assert float((blurred.v_SD - v_SD).abs().max()) > 0.1 and float(blurred.bias_S.abs().max()) > 0.1


def test_sealed_slots_stay_and_new_ones_answer_for_the_rest() -> None:
    """Of three equal keys one is sealed with weight 1: the new one has to weigh 2 and to have the others' mean."""
    k_KD, q_ND = draw(4, DIM), draw(300, DIM, seed=1)
    v_3KD = draw(3, 4, DIM, seed=2)
    target = asked_of(q_ND, k_KD.repeat(3, 1), v_3KD.flatten(0, 1))
    slots = kept(torch.cat((k_KD, k_KD)), torch.cat((v_3KD[0], v_3KD[1])), num_sealed=4)
    [found] = Fit(ridge=1e-9).refit(target, [slots])
    torch.testing.assert_close(found.bias_S, torch.full((4,), 2.0).log(), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.v_SD, v_3KD[1:].mean(0), atol=1e-3, rtol=1e-3)


def test_biases_of_sealed_slots_count() -> None:
    """A sealed slot that stands for two already leaves one of three to the new one."""
    k_KD, q_ND = draw(4, DIM), draw(300, DIM, seed=1)
    v_3KD = draw(3, 4, DIM, seed=2)
    target = asked_of(q_ND, k_KD.repeat(3, 1), v_3KD.flatten(0, 1))
    slots = kept(torch.cat((k_KD, k_KD)), torch.cat((v_3KD[:2].mean(0), v_3KD[2])), num_sealed=4)
    twice_S = torch.cat((torch.full((4,), 2.0).log(), torch.zeros(4)))
    [found] = Fit(ridge=1e-6).refit(target, [replace(slots, bias_S=twice_S)])
    torch.testing.assert_close(found.bias_S, torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.v_SD, v_3KD[2], atol=1e-3, rtol=1e-3)


def test_a_head_without_new_slots_has_nothing_to_fit() -> None:
    k_KD = draw(3, DIM)
    [found] = Fit().refit(asked_of(draw(9, DIM, seed=1), k_KD, k_KD), [kept(k_KD, k_KD, num_sealed=3)])
    assert (found.v_SD.shape, found.bias_S.shape) == ((0, DIM), (0,))


def test_queries_see_slots_up_to_their_own_position() -> None:
    """Key 0 is there twice, at positions 0 and 3, and the later copy goes: a query between them never saw it."""
    k_KD, v_KD, q_ND = draw(3, DIM), draw(3, DIM, seed=1), draw(200, DIM, seed=2)
    k_SD, v_SD = torch.cat((k_KD, k_KD[:1])), torch.cat((v_KD, v_KD[:1]))
    for position, expected in ((2, 1.0), (3, 2.0)):
        seen = slice(0, position + 1)
        target = replace(asked_of(q_ND, k_SD[seen], v_SD[seen]), position_N=torch.full((200,), position))
        [found] = Fit(ridge=1e-9).refit(target, [kept(k_KD, v_KD)])
        assert float(found.bias_S[0].exp()) == pytest.approx(expected, abs=1e-3)


def test_biases_stay_within_the_limit() -> None:
    k_SD, v_SD, q_ND = draw(300, DIM), draw(300, DIM, seed=1), draw(500, DIM, seed=2)
    target = asked_of(q_ND, k_SD, v_SD)
    for limit in (0.0, 0.5, 3.0):
        [found] = Fit(limit=limit).refit(target, [kept(k_SD[:4], v_SD[:4])])
        assert float(found.bias_S.abs().max()) <= limit + 1e-5
    assert float(found.bias_S.max()) > 1.0


def solved(a_NS: Tensor, target_NX: Tensor, strength: float) -> Tensor:
    return ridge(a_NS.unsqueeze(0), target_NX.unsqueeze(0), strength, torch.tensor([a_NS.shape[1]])).squeeze(0)


def test_a_box_that_cuts_is_made_up_for() -> None:
    """Cutting the ridge solution leaves a larger objective than the steps after it do."""
    a_NS, target_N, strength = draw(80, 20).abs(), draw(80, seed=1).abs() * 20, 0.01
    penalty = strength * float(a_NS.square().sum()) / 20

    def objective(x_S: Tensor) -> float:
        return float((a_NS @ x_S - target_N).square().sum() + penalty * (x_S - 1).square().sum())

    whole_S = (1 + solved(a_NS, (target_N - a_NS.sum(-1)).unsqueeze(-1), strength).squeeze(-1)).float()
    assert whole_S.min() < 0.5
    problem = a_NS.unsqueeze(0), target_N.unsqueeze(0), strength, torch.tensor([20])
    found_S = boxed_ridge(*problem, 0.5, 2.0).squeeze(0).float()
    assert found_S.min() >= 0.5 and found_S.max() <= 2.0
    assert objective(found_S) < objective(whole_S.clamp(0.5, 2.0))


def test_tiles_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    tall_NS, wide_NS = draw(50, 9), draw(9, 50)
    whole = [solved(a, draw(len(a), 3, seed=1), 0.01) for a in (tall_NS, wide_NS)]
    monkeypatch.setattr(least_squares, "_TILE", 7)
    for before, a in zip(whole, (tall_NS, wide_NS), strict=True):
        torch.testing.assert_close(solved(a, draw(len(a), 3, seed=1), 0.01), before)


@pytest.mark.parametrize("num_queries", [30, 300], ids=["fewer queries than slots", "more"])
@pytest.mark.parametrize("most_scores", [1 << 25, 20_000], ids=["large batches", "small ones"])
def test_heads_together_are_fitted_as_each_alone(
    num_queries: int, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unequal lengths, sealed slots and none, a head with nothing new, one whose biases the box cuts."""
    monkeypatch.setattr(fit, "_CACHED_SCORES", most_scores)
    lens, sealed = (60, 40, 45, 9, 4, 0, 64), (0, 0, 20, 9, 0, 0, 31)
    k_HSD, v_HSD, q_HND = draw(7, 90, DIM), draw(7, 90, DIM, seed=1), draw(7, num_queries, DIM, seed=2)
    alone = [asked_of(q_HND[i], k_HSD[i], v_HSD[i]) for i in range(7)]
    out_HND, lse_HN = torch.cat([one.out_HND for one in alone]), torch.cat([one.lse_HN for one in alone])
    together = CalibrationTargets(q_HND, out_HND, lse_HN, torch.ones(7, num_queries), SCALE)
    heads = [kept(k_HSD[i, :length], v_HSD[i, :length], sealed[i]) for i, length in enumerate(lens)]
    found = Fit().refit(together, heads)
    assert any(float(one.bias_S.max()) > 2.99 for one in found if len(one.bias_S))
    for one, slots, head in zip(found, heads, alone, strict=True):
        [expected] = Fit().refit(head, [slots])
        torch.testing.assert_close((one.v_SD, one.bias_S), (expected.v_SD, expected.bias_S), atol=1e-4, rtol=1e-4)


def test_batches_hold_heads_of_similar_length() -> None:
    k_SD = draw(100, DIM)
    heads = [kept(k_SD[:length], k_SD[:length]) for length in (100, 10, 80, 12, 0, 70)]
    assert list(batches(heads, 10_000)) == [[1, 3], [5, 2, 0]]
    assert list(batches(heads, 200)) == [[1, 3], [5, 2], [0]]


def test_asking_is_attention_to_every_slot_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal length, biases of stored slots, queries of a whole group, in tiles or not."""
    lens, group = (7, 5), 3
    k_RSD, v_RSD, q_RGTD = draw(2, 7, DIM), draw(2, 7, DIM, seed=1), draw(2, group, 11, DIM, seed=2)
    valid_RS = torch.arange(7) < torch.tensor(lens).unsqueeze(-1)
    k_RSD[1, 5:] = torch.nan  # padding
    bias_RS = draw(2, 7, seed=3)
    spec = LayerSpec(2, 2 * group, DIM, SCALE)
    positions = torch.arange(7).expand(2, -1)
    view = View(0, 1, spec, 2, k_RSD, v_RSD, positions, valid_RS, torch.tensor([7, 7]), bias_RS=bias_RS)
    for most_scores in (1 << 25, 30):
        monkeypatch.setattr(fit, "MOST_SCORES", most_scores)
        found = targets_of(view, q_RGTD, torch.full((11,), 6))
        for head, length in enumerate(lens):
            mine = slice(0, length)
            q_ND = q_RGTD[head].flatten(0, 1)
            out_ND, lse_N = answers(q_ND, k_RSD[head, mine], v_RSD[head, mine], bias_RS[head, mine])
            of_head = found.q_HND[head], found.out_HND[head], found.lse_HN[head]
            torch.testing.assert_close(of_head, (q_ND, out_ND, lse_N))
    assert bool((found.share_HN == 1.0).all())
    early = targets_of(view, q_RGTD, torch.tensor([2] * 11))
    out_ND, _ = answers(early.q_HND[0], k_RSD[0, :3], v_RSD[0, :3], bias_RS[0, :3])
    torch.testing.assert_close(early.out_HND[0], out_ND)


def test_says_what_it_needs() -> None:
    assert Fit(tokens=40).needs.replay == Replay(queries=40)
    needs = Fit(queries="prompt", tokens=40).needs
    assert (needs.last_queries, needs.window, needs.replay) == (40, 0, None)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("keydiff + 64tok + fit", "there is none while decoding; write prefill"),
        ("keydiff + 8x + fit + between_chunks", "not there yet between_chunks"),
        ("keydiff + 8x + fit + slot", "position slot moves them"),
        ("keydiff + 8x + fit + quest", "reader quest ranks pages by keys alone"),
        ("keydiff + 8x + fit(ridge=0)", "ridge is a number above 0"),
        ("keydiff + 8x + fit(limit=31)", "limit is a number from 0 to 30"),
        ("keydiff + 8x + fit(tokens=0)", "tokens is at least 1"),
        ("full + fit", "has no effect, since everything is kept"),
    ],
)
def test_what_cannot_work_is_refused(policy: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        Policy.parse(policy)
