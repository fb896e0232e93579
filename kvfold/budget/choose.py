"""Which slots stay? The highest scores of each head, chosen here and nowhere else.

Ties go to the lower index and, over several heads or layers, to the earlier one, so that a choice never depends on
the device or on the order a sort happens to leave equal values in.

    H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def choose(score_HS: Tensor, count_H: Tensor) -> Tensor:
    """bool [H, S]: the count_H[h] highest scores of each head, or all its slots (score > -inf) where fewer exist."""
    order_HS = score_HS.sort(dim=-1, descending=True, stable=True).indices
    rank_S = torch.arange(score_HS.shape[-1], device=score_HS.device)
    top_HS = rank_S < count_H.to(score_HS.device).unsqueeze(-1)
    return torch.zeros_like(top_HS).scatter(-1, order_HS, top_HS) & (score_HS > -torch.inf)


def choose_same(score_HS: Tensor, count: int) -> Tensor:
    """`choose` with one count for all heads, without a sort: everything above the lowest score that is in, then the
    first of those level with it."""
    count = min(count, score_HS.shape[-1])
    if count == 0:
        return torch.zeros_like(score_HS, dtype=torch.bool)
    last_H1 = score_HS.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_HS, level_HS = score_HS > last_H1, score_HS == last_H1
    room_H1 = count - above_HS.sum(-1, keepdim=True)
    return (above_HS | (level_HS & (level_HS.cumsum(-1) <= room_H1))) & (score_HS > -torch.inf)


def count_top(scores: Sequence[Tensor], total: int) -> list[Tensor]:
    """How many of the `total` highest scores of all heads of all layers each head holds: int64 [H] per layer. Slots
    that must stay (+inf) count even beyond the total, so nobody has to ask a device how many there are."""
    flat = torch.cat([score_HS.flatten() for score_HS in scores])
    # Equal scores stand in line by layer, head and slot; the first of them fill what is left.
    kept = choose_same(flat.unsqueeze(0), total).squeeze(0) | (flat == torch.inf)
    parts = torch.split(kept, [score_HS.numel() for score_HS in scores])
    return [part.view(score_HS.shape).sum(-1) for part, score_HS in zip(parts, scores, strict=True)]
