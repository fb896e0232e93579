"""What a head answers to some queries while its whole cache is there: the targets that `fit` reproduces.

Per head and in tiles of queries, so that no more than a few hundred megabytes of scores exist at once.

    H KV heads   G query heads per KV head   T tokens whose queries are asked   N = G * T   S slots   D head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.evicted.base import Asked
from kvfold.score.base import View

_MOST_SCORES = 1 << 25  # of a tile, 128 MiB


def ask(view: View, q_HGTD: Tensor, position_T: Tensor | None = None) -> list[Asked]:
    """Every head's answers; with positions, a query sees slots up to its own."""
    group = q_HGTD.shape[1]
    position_N = None if position_T is None else position_T.repeat(group)
    return [_ask_head(view, head, q_GTD.flatten(0, 1), position_N) for head, q_GTD in enumerate(q_HGTD)]


def _ask_head(view: View, head: int, q_ND: Tensor, position_N: Tensor | None) -> Asked:
    hidden_S = ~view.valid_RS[head]
    k_SD, v_SD = (
        x_SD.masked_fill(hidden_S.unsqueeze(-1), 0.0).float() for x_SD in (view.k_RSD[head], view.v_RSD[head])
    )
    bias_S = torch.zeros(len(k_SD), device=k_SD.device) if view.bias_RS is None else view.bias_RS[head]
    bias_S = bias_S.masked_fill(hidden_S, -torch.inf)
    step = max(1, _MOST_SCORES // max(len(k_SD), 1))
    positions = [None] * -(-len(q_ND) // step) if position_N is None else position_N.split(step)
    parts = []
    for q_nD, position_n in zip(q_ND.split(step), positions, strict=True):
        score_nS = scores(q_nD, k_SD, bias_S, view.spec.scale, position_n, view.position_RS[head])
        lse_n = score_nS.logsumexp(-1)
        parts.append((torch.exp(score_nS - lse_n.unsqueeze(-1)) @ v_SD, lse_n))
    out_ND, lse_N = (torch.cat(column) for column in zip(*parts, strict=True))
    return Asked(q_ND, out_ND, lse_N, view.spec.scale, position_N)


def scores(
    q_ND: Tensor, k_SD: Tensor, bias_S: Tensor, scale: float, position_N: Tensor | None, position_S: Tensor
) -> Tensor:
    """Scaled scores with biases, fp32 [N, S]; -inf where a query does not see a slot."""
    score_NS = (q_ND.float() @ k_SD.float().mT).mul_(scale).add_(bias_S)
    if position_N is not None:
        score_NS.masked_fill_(position_S > position_N.unsqueeze(-1), -torch.inf)
    return score_NS
