"""Under `slot` positions scores look at keys at the distances that attention has: stored keys are rotated before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvfold.attend.lse_merge import LseMerge
from kvfold.attend.paged import merge_paged
from kvfold.compression import view as views
from kvfold.compression.view import NewSlots
from kvfold.models.loader import Model
from kvfold.pages.observer_state import LayerObserverState
from kvfold.score.base import Needs, View
from kvfold.session import Session
from tests.tiny import prompt


@pytest.mark.parametrize("position", ["keep", "slot"])
@pytest.mark.parametrize(
    "score",
    ["tova", "snapkv(window=4)", "rkv(window=4)", "kvcompress(window=4)", "expected", "knorm + adaptive(window=4)"],
)
def test_scores_see_the_distances_that_attention_sees(
    model: Model, monkeypatch: pytest.MonkeyPatch, score: str, position: str
) -> None:
    """The log-sum of a query's weights over the stored slots of each head is that of the reader."""
    observe = views._fill_observations
    apart: list[Any] = []

    def watching(view: View, side: LayerObserverState, new: NewSlots, needs: Needs) -> None:
        observe(view, side, new, needs)
        cache = session.cache
        lens = cache.stored_lens(view.layer)
        if (needs.last_queries or needs.query_stats) and min(lens) and cache.sealed_len > max(lens):
            q_HGTD = torch.randn(len(lens), view.spec.group, 1, view.spec.head_dim)
            merge = LseMerge(q_HGTD)
            merge_paged(merge, cache, view.layer, q_HGTD, new.end, whole=True)
            assert merge.lse_HGT is not None
            for head, length in enumerate(lens):
                logit_GTS = q_HGTD[head] @ view.k_RSD[head, :length].T * view.spec.scale
                apart.append((logit_GTS.logsumexp(-1) - merge.lse_HGT[head]).abs().max().item())

    monkeypatch.setattr(views, "_fill_observations", watching)
    policy = f"{score} + 48tok + {position} + protect(sinks=2, recent=4)"
    with Session(model, policy, template=None, page_size=4, open_len=8) as session:
        session.extend(prompt(120))
        session.generate(max_new_tokens=30)
        session.extend(prompt(20, seed=2))
    assert apart and max(apart) < 1e-3
