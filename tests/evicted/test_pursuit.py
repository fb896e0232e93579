"""The choice of a pursuit against objectives solved one by one.

N queries   S slots   M of them new   X targets   D head dim
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.evicted import Asked, Fit, Pool, Survivors
from kvfold.evicted.pursuit import pursue

DIM, SCALE, RIDGE = 8, 0.5, 0.05


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head(num_slots: int, num_sealed: int, seed: int) -> Survivors:
    k_SD, v_SD = draw(num_slots, DIM, seed=seed), draw(num_slots, DIM, seed=seed + 1)
    bias_S = torch.where(torch.arange(num_slots) < num_sealed, draw(num_slots, seed=seed + 2), 0.0)
    return Survivors(k_SD, v_SD, bias_S, torch.arange(num_slots), num_sealed)


def asked_of(heads: list[Survivors], num_queries: int, *, positions: bool = False) -> Asked:
    """Of whole caches: those slots, and as many that went before."""
    q_HND, share_HN = draw(len(heads), num_queries, DIM, seed=7), draw(len(heads), num_queries, seed=8).sigmoid()
    answers = []
    for one, q_ND in zip(heads, q_HND, strict=True):
        k_SD, v_SD = (torch.cat((x, draw(len(x), DIM, seed=9 + i))) for i, x in enumerate((one.k_SD, one.v_SD)))
        score_NS = q_ND @ k_SD.T * SCALE + torch.cat((one.bias_S, torch.zeros(len(one.bias_S))))
        answers.append((score_NS.softmax(-1) @ v_SD, score_NS.logsumexp(-1)))
    out_HND, lse_HN = map(torch.stack, zip(*answers, strict=True))
    position_N = torch.arange(num_queries) if positions else None
    return Asked(q_HND, out_HND, lse_HN, share_HN, SCALE, position_N)


def plain_choice(asked: Asked, one: Survivors, pool: Pool) -> list[int]:
    """Greedily, every objective solved anew."""
    score_NS = asked.q_HND[0] @ one.k_SD.T * SCALE + one.bias_S
    if asked.position_N is not None:
        score_NS = score_NS.masked_fill(one.position_S > asked.position_N.unsqueeze(-1), -torch.inf)
    share_N1 = asked.share_HN[0].unsqueeze(-1)
    a_NS = ((score_NS - asked.lse_HN[0].unsqueeze(-1)).exp() * share_N1).double()
    norm = one.v_SD.square().sum(-1).mean().sqrt()
    t_NX = (torch.cat((asked.out_HND[0], norm.expand(len(a_NS), 1)), dim=1) * share_N1).double()
    penalty = RIDGE * float(a_NS.square().sum(0).mean())

    def left_over(taken: list[int]) -> float:
        some = a_NS[:, taken]
        w = torch.linalg.solve(some.T @ some + penalty * torch.eye(len(taken), dtype=some.dtype), some.T @ t_NX)
        return float((t_NX - some @ w).square().sum() + penalty * w.square().sum())

    by_score = sorted(range(len(pool.score_S)), key=lambda j: -float(pool.score_S[j]))
    new = by_score[: pool.num_must + (pool.num_stay - pool.num_must) // 2]
    sealed = list(range(one.num_sealed))
    while len(new) < pool.num_stay:
        taken = [*sealed, *(one.num_sealed + j for j in new)]
        free = [j for j in range(len(pool.score_S)) if j not in new]
        new.append(min(free, key=lambda j: left_over([*taken, one.num_sealed + j])))
    return sorted(new)


def pool_of(num_new: int, count: int, must: list[int], seed: int) -> Pool:
    score_S = draw(num_new, seed=seed)
    score_S[must] = torch.inf
    return Pool(score_S, count, len(must))


@pytest.mark.parametrize("num_queries", [12, 60], ids=["fewer queries than slots", "more"])
@pytest.mark.parametrize("positions", [False, True], ids=["all seen", "up to a position"])
@pytest.mark.parametrize("most_scores", [1 << 20, 1], ids=["together", "one by one"])
def test_takes_what_leaves_least(num_queries: int, positions: bool, most_scores: int) -> None:
    """Unequal heads: without and with sealed slots, and three that have no choice."""
    heads = [head(21, 0, 10), head(25, 5, 20), head(18, 2, 30), head(16, 0, 40), head(20, 4, 50), head(16, 0, 60)]
    pools = [pool_of(21, 9, [2, 7], 1), pool_of(20, 6, [], 2), pool_of(16, 11, [0], 3), pool_of(16, 16, [], 4)]
    pools += [pool_of(16, 0, [], 5), pool_of(16, 3, [4, 5, 9], 6)]
    asked = asked_of(heads, num_queries, positions=positions)
    found = [index_S.tolist() for index_S in pursue(asked, heads, pools, RIDGE, most_scores)]
    expected = [plain_choice(asked.of([i]), heads[i], pools[i]) for i in range(3)]
    assert found == [*expected, list(range(16)), [], [4, 5, 9]]
    by_score = [pool.score_S.topk(pool.num_stay).indices.sort().values.tolist() for pool in pools]
    assert all(mine != theirs for mine, theirs in zip(found[:3], by_score, strict=False))
    assert {2, 7} <= set(found[0]) and 0 in found[2]


def test_of_two_slots_that_tell_the_same_one_goes() -> None:
    one = head(6, 0, 60)
    k_SD, v_SD = one.k_SD.clone() * 2, one.v_SD.clone()
    k_SD[3], v_SD[3] = k_SD[1], v_SD[1]
    one = replace(one, k_SD=k_SD, v_SD=v_SD)
    pool = Pool(torch.tensor([0.1, 0.9, 0.3, 0.8, 0.2, 0.4]), 3, 0)
    [found] = Fit(keys="pursuit").choose(asked_of([one], 60), [one], [pool])
    assert 1 in found.tolist() and 3 not in found.tolist()


def test_what_nobody_asks_for_goes_by_score() -> None:
    one, pool = head(12, 0, 70), pool_of(12, 5, [], 6)
    silent = replace(asked_of([one], 20), share_HN=torch.zeros(1, 20))
    [found] = pursue(silent, [one], [pool], RIDGE, 1 << 20)
    assert found.tolist() == pool.score_S.topk(5).indices.sort().values.tolist()
