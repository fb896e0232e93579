"""Half of the slots by score, half by what those would miss: orthogonal least squares over the queries of `fit`.

A score judges slots one by one, and keeps two that tell the same. A matching pursuit (Attention Matching,
arXiv:2602.16284, has one) takes next what leaves least of the answers unexplained by a mixture of all that was taken.
Alone it follows what many queries ask, and a needle is asked for by few: it chooses half.

In the terms of `fit`, A = C X and T = C [Y, u 1]: answers and their mass, u the norm of a value. Each turn takes the j
that takes most off |A W - T|^2 + m |W|^2. Sealed slots and the best by score are there before the first turn.

    G = A'A + m I,  R = A'T      gain of j: |R_j|^2 / G_jj      G -= G_:j G_j: / G_jj,  R -= G_:j R_j / G_jj

G itself is not changed: what was taken off it is kept as rows of a factor, and those that are asked for are made anew.

    B heads   N queries   S slots: new ones by falling score, then sealed ones   M new ones   D head dim   X = D + 1
    T slots that are there before the first turn   Z slots that were taken
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.evicted.base import Asked, Pool, Survivors
from kvfold.evicted.least_squares import gram, product
from kvfold.evicted.padded import Padded, batches, weights


@dataclass
class Left:
    """What is left of G and R of some heads, fp64; G as it was, its diagonal, and the factor of what was taken off."""

    gram_BSS: Tensor
    right_BSX: Tensor
    penalty_B1: Tensor  # m

    def __post_init__(self) -> None:
        self.diagonal_BS = self.gram_BSS.diagonal(dim1=1, dim2=2).clone()
        self._factor_BZS = self.gram_BSS[:, :0]
        self._num_rows = 0

    def make_room(self, num_rows: int) -> None:
        """For so many slots to be taken."""
        heads, slots = self.diagonal_BS.shape
        self._factor_BZS = self.gram_BSS.new_zeros(heads, num_rows, slots)

    def take_at_once(self, slot_T: Tensor, is_wanted_BT: Tensor) -> None:
        """These slots, of each head those that are wanted."""
        other_BT1 = ~is_wanted_BT.unsqueeze(-1)
        row_BTS = self.gram_BSS[:, slot_T].masked_fill(other_BT1, 0.0)
        block_BTT = row_BTS[:, :, slot_T].masked_fill(other_BT1.mT, 0.0)
        block_BTT.diagonal(dim1=1, dim2=2).masked_fill_(~is_wanted_BT, 1.0)
        lower_BTT = torch.linalg.cholesky(block_BTT)
        right_BTX = self.right_BSX[:, slot_T].masked_fill(other_BT1, 0.0)
        solved = (torch.linalg.solve_triangular(lower_BTT, x, upper=False) for x in (row_BTS, right_BTX))
        self._deflate(*solved)

    def take(self, slot_B1: Tensor) -> None:
        """One slot of each head."""
        at_B11, before_BzS = slot_B1.unsqueeze(-1), self._factor_BZS[:, : self._num_rows]
        row_B1S = self.gram_BSS.gather(1, at_B11.expand(-1, -1, before_BzS.shape[2]))
        row_B1S = row_B1S - before_BzS.gather(2, at_B11.expand(-1, self._num_rows, -1)).mT @ before_BzS
        right_B1X = self.right_BSX.gather(1, at_B11.expand(-1, -1, self.right_BSX.shape[2]))
        root_B11 = self.diagonal_BS.gather(1, slot_B1).sqrt().unsqueeze(-1)
        self._deflate(row_B1S / root_B11, right_B1X / root_B11)

    def _deflate(self, row_BZS: Tensor, right_BZX: Tensor) -> None:
        end = self._num_rows + row_BZS.shape[1]
        self._factor_BZS[:, self._num_rows : end] = row_BZS
        self._num_rows = end
        self.right_BSX.baddbmm_(row_BZS.mT, right_BZX, alpha=-1.0)
        self.diagonal_BS = (self.diagonal_BS - row_BZS.square().sum(1)).maximum(self.penalty_B1)

    @property
    def gain_BS(self) -> Tensor:
        return self.right_BSX.square().sum(-1) / self.diagonal_BS


def pursue(
    asked: Asked, heads: Sequence[Survivors], pools: Sequence[Pool], ridge: float, most_scores: int
) -> list[Tensor]:
    """Which new slots of each head stay, ascending. Batches of heads have at most so many scores."""
    order = [pool.score_S.sort(descending=True, stable=True).indices for pool in pools]
    found = [falling_M[: pool.num_stay] for falling_M, pool in zip(order, pools, strict=True)]
    open_heads = [i for i, pool in enumerate(pools) if pool.num_must < pool.num_stay < len(pool.score_S)]
    sorted_heads = [_by_score(heads[i], order[i]) for i in open_heads]
    longest = max((len(head.k_SD) for head in sorted_heads), default=0)
    for batch in batches(sorted_heads, most_scores // max(asked.q_HND.shape[1], longest, 1)):
        mine = [open_heads[i] for i in batch]
        left = _normal_equations(asked.of(mine), [sorted_heads[i] for i in batch], ridge)
        firsts = [_num_by_score(pools[i]) for i in mine]
        new_lens = [len(pools[i].score_S) for i in mine]
        turns = max(pools[i].num_stay - first for i, first in zip(mine, firsts, strict=True))
        for i, first, turn_T in zip(mine, firsts, in_turns(left, firsts, new_lens, turns), strict=True):
            taken_T = order[i][turn_T[: pools[i].num_stay - first]]
            found[i] = torch.cat((order[i][:first], taken_T))
    return [index_S.sort().values for index_S in found]


def _num_by_score(pool: Pool) -> int:
    """What has to stay, and half of the rest."""
    return pool.num_must + (pool.num_stay - pool.num_must) // 2


def _by_score(head: Survivors, falling_M: Tensor) -> Survivors:
    """With its new slots in this order."""
    sealed = torch.arange(head.num_sealed, device=falling_M.device)
    index_S = torch.cat((sealed, head.num_sealed + falling_M))
    columns = ("k_SD", "v_SD", "bias_S", "position_S")
    return replace(head, **{name: getattr(head, name)[index_S] for name in columns})


def _normal_equations(asked: Asked, heads: Sequence[Survivors], ridge: float) -> Left:
    slots = Padded.of(heads)
    count_B = torch.tensor([len(head.k_SD) for head in heads], device=slots.k_BSD.device)
    share_BN1 = asked.share_HN.unsqueeze(-1)
    weight_BNS = weights(asked, slots).mul_(share_BN1)
    norm_B = (slots.v_BSD.float().square().sum((1, 2)) / count_B).sqrt()
    mass_BN1 = norm_B.view(-1, 1, 1).expand_as(share_BN1)
    target_BNX = torch.cat((asked.out_HND.float(), mass_BN1), dim=-1) * share_BN1
    gram_BSS, right_BSX = gram(weight_BNS.mT), product(weight_BNS.mT, target_BNX)
    diagonal_BS = gram_BSS.diagonal(dim1=1, dim2=2)
    penalty_B1 = (ridge * diagonal_BS.sum(-1, keepdim=True) / count_B.unsqueeze(-1)).clamp(min=1e-12)
    diagonal_BS.add_(penalty_B1)
    return Left(gram_BSS, right_BSX, penalty_B1)


def in_turns(left: Left, firsts: Sequence[int], new_lens: Sequence[int], num_turns: int) -> Tensor:
    """int64 [B, num_turns]: new slots in the order in which they are taken, after the first `firsts` of each head and
    what is sealed. A head that takes fewer has no use for the last ones."""
    most_first, most_new, device = max(firsts), max(new_lens), left.gram_BSS.device
    first_B1, new_B1 = (torch.tensor(counts, device=device).unsqueeze(-1) for counts in (firsts, new_lens))
    slot_S = torch.arange(left.gram_BSS.shape[1], device=device)
    there_T = torch.cat((slot_S[:most_first], slot_S[most_new:]))
    left.make_room(len(there_T) + num_turns)
    left.take_at_once(there_T, (there_T < first_B1) | (there_T >= most_new))
    free_BS, taken = (slot_S >= first_B1) & (slot_S < new_B1), list[Tensor]()
    for _ in range(num_turns):
        best_B1 = left.gain_BS.masked_fill(~free_BS, -torch.inf).argmax(1, keepdim=True)
        left.take(best_B1)
        free_BS.scatter_(1, best_B1, False)
        taken.append(best_B1)
    return torch.cat(taken, dim=1)
