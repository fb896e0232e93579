"""A view on which attention can be worked out by hand: keys are the logarithms of votes and every query is 1, so a
query attends to what it may see in proportion to the votes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfold.core import LayerSpec
from kvfold.score import View


def votes_view(votes: Sequence[float], num_queries: int, *, slots_per_head: int = 0, loudness: float = 1.0) -> View:
    """One row; the last `num_queries` tokens ask. A query of loudness 2 attends by the squares of the votes."""
    position_RS = torch.arange(len(votes)).unsqueeze(0)
    k_RSD = torch.tensor(votes).add(1e-12).log().view(1, -1, 1)
    return View(
        layer=0,
        num_layers=1,
        spec=LayerSpec(num_kv_heads=1, num_query_heads=1, head_dim=1, scale=1.0),
        num_heads=1,
        k_RSD=k_RSD,
        v_RSD=torch.ones_like(k_RSD),
        position_RS=position_RS,
        valid_RS=torch.ones_like(position_RS, dtype=torch.bool),
        seen_R=torch.tensor([len(votes)]),
        slots_per_head=slots_per_head,
        protected_RS=torch.zeros_like(position_RS, dtype=torch.bool),
        q_RGWD=torch.full((1, 1, num_queries, 1), loudness),
        q_position_RW=position_RS[:, -num_queries:],
    )
