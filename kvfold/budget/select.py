"""Top-k selection: the highest scores of each head are kept; the one place that selects slots.

Ties go to the lower index and, over several heads or layers, to the earlier one, so that a selection never depends on
the device or on the order a sort happens to leave equal values in.

    H heads   S slots
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def select_top(score_HS: Tensor, count_H: Tensor) -> Tensor:
    """bool [H, S]: the count_H[h] highest scores of each head, or all its slots (score > -inf) where fewer exist."""
    return ranks(score_HS) < count_H.unsqueeze(-1)


def ranks(score_HS: Tensor) -> Tensor:
    """int32 [H, S]: a slot's place among those of its head, the highest score first; the last of all numbers where
    there is no slot, or its score is no number."""
    known_HS = score_HS.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order_HS = known_HS.sort(dim=-1, descending=True, stable=True).indices
    place_S = torch.arange(score_HS.shape[-1], dtype=torch.int32, device=score_HS.device)
    rank_HS = torch.empty_like(order_HS, dtype=torch.int32).scatter_(-1, order_HS, place_S.expand_as(order_HS))
    return rank_HS.masked_fill_(known_HS == -torch.inf, torch.iinfo(torch.int32).max)


def select_same(score_HS: Tensor, count: int) -> Tensor:
    """`select_top` with one count for all heads, without a sort: everything above the lowest score that is in, then the
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
    that must stay (+inf) count even beyond the total, so no count is read back from the device."""
    row_RS = torch.cat(_equally_long(scores)) if len(scores) > 1 else scores[0]
    # What is no number is chosen last of all (`ranks`), so it does not count either.
    row_RS = row_RS.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    last = row_RS.flatten().topk(min(max(total, 1), row_RS.numel()), sorted=False).values.amin()
    last = last.nan_to_num()  # finite, so that +inf is above it and -inf never level
    above_R, level_R = (row_RS > last).sum(-1), (row_RS == last).sum(-1)
    # Equal scores stand in line by layer and head; the first of them fill what is left.
    room_R = total - above_R.sum() - (level_R.cumsum(0) - level_R)
    count_R = above_R + room_R.clamp(min=0).minimum(level_R)
    return list(count_R.split([len(score_HS) for score_HS in scores]))


def _equally_long(scores: Sequence[Tensor]) -> list[Tensor]:
    """Rows of all layers padded on the right, where they differ, by slots that do not exist."""
    most = max(score_HS.shape[1] for score_HS in scores)
    more = [most - score_HS.shape[1] for score_HS in scores]
    return [pad(s, (0, n), value=-torch.inf) if n else s for s, n in zip(scores, more, strict=True)]
