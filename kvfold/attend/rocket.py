"""`rocket`: reads of single slots chosen by a summary of their keys, the second stage of RocketKV (arXiv:2502.14051).

The method has two stages. The first drops for good what the end of the prompt does not look at, which is a scorer and a
size; the second, this reader, chooses at every step among what is left. With a budget of B tokens and c = L / B the
first keeps L / c^r slots, r = min(0.2 + 0.06 log2 c, 0.8): for 32k tokens and B = 1024 about 5.7x, so the published
form, whose second stage reads B / 2 of c^(1 - r) * B slots, is

    snapkv(window=32, kernel=63, pool=max, over_window=sum, over_group=sum) + 5.7x
        + rocket(tokens=512, reader=pages, ratio=5.6)

`rocket(tokens=512)` reads by a sketch of the keys instead, which is not RocketKV's.

For conversations, where the next question may ask for anything, `rocket(tokens=1024)` alone evicts nothing.

`reader=pages` joins Quest's bound on a page (arXiv:2406.10774) with SparQ's choice of channels (arXiv:2312.04985). For
a group of queries q_g that share keys, with s = sum_g q_g:

    k̂_d = the largest k_d of the page where s_d > 0, else the least         channels: the r of largest mean_g |q_d|
    z_g = sum over these channels of q_d k̂_d, over sqrt(sum |q| of these channels / sum |q| of all)

The root is SparQ's temperature: fewer channels make smaller sums, which would flatten a softmax. All slots of a page
have its score. A page is a few slots in a row here; the last of a memory page may be shorter.

    H KV heads   G query heads per KV head   T queries   D head dim   U units   W units read   M memory pages
    P slots of one   C pages in one   X pages, M * C   S slots, M * P   R channels that count
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.attend import rabitq as sketch
from kvfold.attend.quest import bound_fields, page_bounds
from kvfold.codec.base import Field
from kvfold.policy.reader import All, PageView, Reader
from kvfold.policy.registry import register

_SINKS = 4  # first slots
_RATIO = 4.0  # of slots held to the token budget


@register(
    "attend",
    "rocket",
    revision=2,
    paper="arXiv:2502.14051",
    cost="d bits and 2 bytes per slot, d + 4 per page; reader=pages: 2·d per ceil(√ratio) slots",
    published="as published with `reader=pages` (the stage-1 size by hand); the default sketch is not RocketKV's",
)
@dataclass(frozen=True)
class Rocket(Reader):
    """While decoding, read the `tokens` slots of each KV head that a summary of the keys gives most attention.

    weight of a slot = mean over the group of softmax(scale * z), z being q.k as the summary tells it. The W =
    ceil(tokens / u) units of largest weight are read, a unit being u slots that the codec decodes together: one for
    most codecs, a page for kivi4 and kivi2. The latest tokens are read from the open block, on top.

    `reader=pages` is the second stage as published: pages of ceil(sqrt(ratio)) slots (1 where that exceeds the ratio)
    are judged by the least and largest values of their keys in int(d * page / ratio) channels, with SparQ's
    temperature; `ratio`, by default 4, is that of slots held to the token budget, and `tokens` half of that budget.
    Pages begin anew in every page of memory.

    `reader=sketch`, the default, is not RocketKV's: one bit of each channel and slot tells q.k
    (kvfold/attend/rabitq.py), and the first four slots are always read: many heads leave their attention there, and
    where a sketch misses them everything else counts too much. In a tenth of the bytes bounds of 16 slots miss most of
    what an exact answer is copied from (dev/LOG.md).

    The published multi-turn form filters a copy of the cache anew in every turn; here, without a size, every slot
    competes at every step.
    """

    selects: ClassVar[bool] = True

    tokens: int = 1024
    skip_layers: int = 0
    reader: Literal["sketch", "pages"] = "sketch"
    ratio: float | None = None

    def validate(self) -> str | None:
        if not self.tokens:
            return "tokens is at least 1, not 0; leave rocket out to read everything"
        if self.ratio is not None and self.reader != "pages":
            return "ratio sizes the pages of reader=pages; leave it out or write reader=pages"
        if self.ratio is not None and not self.ratio >= 1:
            return f"ratio, of slots held to the token budget, is at least 1, not {self.ratio:g}"
        return None

    def at(self, layer: int) -> Reader:
        return All() if layer < self.skip_layers else self

    def summaries(self, head_dim: int, kv_dtype: torch.dtype, page_size: int) -> tuple[Field, ...]:
        if self.reader == "pages":
            return bound_fields(head_dim, kv_dtype, page_size, self._page)
        return sketch.fields(head_dim)

    def summarise(self, k_MPD: Tensor, used_MP: Tensor) -> dict[str, Tensor]:
        if self.reader == "pages":
            return page_bounds(k_MPD, used_MP, self._page)
        return sketch.sketch(k_MPD, used_MP)

    def unit(self, page_size: int, group: int) -> int:
        return group

    def num_units(self, unit: int) -> int:
        return -(-self.tokens // unit)

    def select(self, view: PageView) -> Tensor:
        logit_HGTS = self._logits(view)
        unit = logit_HGTS.shape[-1] // view.used_HU.shape[1]
        used_HUP = torch.arange(unit, device=logit_HGTS.device) < view.used_HU.unsqueeze(-1)
        unused_H11S = ~used_HUP.flatten(1)[:, None, None]
        weight_HTS = logit_HGTS.masked_fill(unused_H11S, -torch.inf).softmax(-1).mean(1)
        weight_HTU: Tensor = weight_HTS.unflatten(-1, (-1, unit)).sum(-1)
        if self.reader == "sketch":
            weight_HTU[..., : -(-_SINKS // unit)] += 2.0  # others have 1 at most
        # A unit of no slot has weight 0, and so may a real one that lies far below the best.
        return weight_HTU.masked_fill((view.used_HU == 0).unsqueeze(1), -1.0).topk(view.num_units).indices

    def _logits(self, view: PageView) -> Tensor:
        """q.k * scale as the summaries tell it, [H, G, T, S]."""
        if self.reader == "pages":
            return _page_logits(view, self._page, max(1, int(view.q_HGTD.shape[-1] * self._page / self._ratio)))
        z_HXS = sketch.products(view.q_HGTD.flatten(1, 2), view.summaries)
        z_HGTS: Tensor = z_HXS.unflatten(1, view.q_HGTD.shape[1:3])
        return z_HGTS * view.scale

    @property
    def _ratio(self) -> float:
        return _RATIO if self.ratio is None else self.ratio

    @property
    def _page(self) -> int:
        page = math.ceil(math.sqrt(self._ratio))
        return page if page <= self._ratio else 1


def _page_logits(view: PageView, page: int, num_channels: int) -> Tensor:
    """z * scale, fp32 [H, G, T, S]; of slots that are not used anything, also NaN."""
    q_HGTD = view.q_HGTD.float()
    head_dim = q_HGTD.shape[-1]
    low_HXD, high_HXD = (view.summaries.read(name).float().unflatten(-1, (-1, head_dim)) for name in ("min", "max"))
    num_pages = low_HXD.shape[1]  # of memory
    low_HXD, high_HXD = low_HXD.flatten(1, 2), high_HXD.flatten(1, 2)
    index_HTR = q_HGTD.abs().mean(1).topk(num_channels, dim=-1).indices
    few_HGTR = q_HGTD.gather(-1, index_HTR.unsqueeze(1).expand(-1, q_HGTD.shape[1], -1, -1))
    rises_HTR = q_HGTD.sum(1).gather(-1, index_HTR) > 0
    index_HTXR = index_HTR.unsqueeze(2).expand(-1, -1, low_HXD.shape[1], -1)
    low_HTXR, high_HTXR = (
        x_HXD.unsqueeze(1).expand(-1, index_HTR.shape[1], -1, -1).gather(-1, index_HTXR)
        for x_HXD in (low_HXD, high_HXD)
    )
    bound_HTXR = torch.where(rises_HTR.unsqueeze(2), high_HTXR, low_HTXR)
    z_HGTX = torch.einsum("hgtr,htxr->hgtx", few_HGTR, bound_HTXR)
    share_HGT1 = few_HGTR.abs().sum(-1, keepdim=True) / q_HGTD.abs().sum(-1, keepdim=True).clamp(min=1e-30)
    scaled_HGTX = z_HGTX * view.scale / share_HGT1.clamp(min=1e-30).sqrt()
    by_page: Tensor = scaled_HGTX.unflatten(-1, (num_pages, -1)).repeat_interleave(page, dim=-1)[..., : view.page_size]
    return by_page.flatten(-2)
