"""Small random views to test a scorer with: ragged rows, gaps between positions, grouped query heads.

R rows   S slots   D head dim   G query heads per KV head   W queries of the window   H KV heads   M hidden dims
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from kvfold.core import LayerSpec, Rope
from kvfold.score.base import Needs, QueryStats, View
from kvfold.score.predictor import LayerPredictor

HEAD_DIM, HEADS, GROUP, HIDDEN = 8, 2, 3, 12
KEPT = 14  # slots a head is to keep on average
SPEC = LayerSpec(HEADS, HEADS * GROUP, HEAD_DIM, HEAD_DIM**-0.5, rope=Rope((1.0, 0.1, 0.01), attention_scale=1.1))


def make_view(seen: tuple[int, ...], lens: tuple[int, ...], needs: Needs, seed: int = 0) -> View:
    """A view of len(seen) sequences; row r stores lens[r] of its sequence's tokens, the last one always among them."""
    g = torch.Generator().manual_seed(seed)
    seen_R = torch.tensor(seen).repeat_interleave(HEADS)
    num_rows, num_slots = len(lens), max(lens)
    valid_RS = torch.arange(num_slots) < torch.tensor(lens).unsqueeze(-1)
    position_RS = torch.zeros(num_rows, num_slots, dtype=torch.int64)
    for row, (tokens, stored) in enumerate(zip(seen_R.tolist(), lens, strict=True)):
        position_RS[row, :stored] = _positions(tokens, stored, g)
    view = View(
        layer=1,
        num_layers=4,
        spec=SPEC,
        num_heads=HEADS,
        k_RSD=torch.randn(num_rows, num_slots, HEAD_DIM, generator=g),
        v_RSD=torch.randn(num_rows, num_slots, HEAD_DIM, generator=g),
        position_RS=position_RS,
        valid_RS=valid_RS,
        seen_R=seen_R,
        slots_per_head=KEPT,
    )
    return with_needs(view, needs, g)


def _positions(tokens: int, stored: int, g: torch.Generator) -> Tensor:
    earlier = torch.randperm(tokens - 1, generator=g)[: stored - 1]
    return torch.cat((earlier, torch.tensor([tokens - 1]))).sort().values


def with_needs(view: View, needs: Needs, g: torch.Generator) -> View:
    """The view with exactly the optional parts that `needs` ask for."""
    num_rows, num_slots = view.valid_RS.shape
    if window := needs.last_queries:
        ago_W = torch.arange(window, 0, -1)
        q_RGWD = torch.randn(num_rows, GROUP, window, HEAD_DIM, generator=g)
        view = replace(view, q_RGWD=q_RGWD, q_position_RW=(view.seen_R.unsqueeze(-1) - ago_W).clamp(min=-1))
    if needs.new_queries:
        num_tokens = int(view.seen_R.max())
        view = replace(view, new_q_RGTD=torch.randn(num_rows, GROUP, num_tokens, HEAD_DIM, generator=g))
    if needs.mass:
        count_RS = GROUP * (view.seen_R.unsqueeze(-1) - view.position_RS).float()
        mass_RS = torch.rand(num_rows, num_slots, generator=g) * count_RS
        view = replace(view, mass_RS=mass_RS, mass_count_RS=count_RS)
    if needs.query_stats:
        q_RGTD = torch.randn(num_rows, GROUP, 2 * HEAD_DIM, HEAD_DIM, generator=g)
        cov_RGDD = q_RGTD.transpose(-1, -2) @ q_RGTD / (2 * HEAD_DIM)
        view = replace(view, stats=QueryStats(q_RGTD.mean(dim=2), cov_RGDD))
    if needs.replay is not None:
        view = replace(view, replay_RGS=torch.rand(num_rows, GROUP, num_slots, generator=g))
    if needs.output:
        view = replace(view, wo_HGDM=torch.randn(HEADS, GROUP, HEAD_DIM, HIDDEN, generator=g))
    if needs.sentence_len:
        number_P = (torch.rand(int(view.seen_R.max()), generator=g) < 0.1).cumsum(0)
        view = replace(view, sentence_RS=number_P[view.position_RS])
    if needs.protected:
        view = replace(view, protected_RS=view.position_RS < 3)
    if needs.predictor is not None:
        shapes = ((HEADS, 2 * HEAD_DIM), (HEADS, 2 * HEAD_DIM, 5), (HEADS, 5), (HEADS, 6))
        view = replace(view, predictor=LayerPredictor(*(torch.randn(shape, generator=g) for shape in shapes)))
    return view


def sequence(view: View, index: int) -> View:
    """One sequence of the batch alone, its padding cut to what it needs itself."""
    rows = slice(index * view.num_heads, (index + 1) * view.num_heads)
    num_slots = int(view.len_R[rows].max())
    parts = {field.name: getattr(view, field.name) for field in fields(view)}
    cut = {name: part[rows] for name, part in parts.items() if isinstance(part, Tensor) and "_R" in name}
    cut = {name: part[:, :num_slots] if "_RS" in name else part for name, part in cut.items()}
    cut = {name: part[..., :num_slots] if "_RGS" in name else part for name, part in cut.items()}
    if view.stats is not None:
        parts["stats"] = QueryStats(view.stats.mean_RGD[rows], view.stats.cov_RGDD[rows])
    return View(**(parts | cut))
