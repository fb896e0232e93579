"""`rocket`: RocketKV's second stage, reads of pages by a few channels of their keys (arXiv:2502.14051).

The method has two stages. The first drops for good what the end of the prompt does not look at, which is a scorer and a
size; the second, this reader, chooses at every step among what is left. With a budget of B tokens and c = L / B the
first keeps L / c^r slots, r = min(0.2 + 0.06 log2 c, 0.8): for 32k tokens and B = 1024 about 5.7x, so

    snapkv(window=32, kernel=63, pool=max, over_window=sum, over_group=sum) + 5.7x + rocket(tokens=1024)

For conversations, where the next question may ask for anything, `rocket(tokens=1024)` alone evicts nothing.

    H KV heads   G query heads per KV head   T queries   D head dim   C channels looked at   M pages   W pages read
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.attend.quest import Quest
from kvfold.codec.base import Field
from kvfold.policy.reader import All, PageView, Reader, Summaries
from kvfold.policy.registry import register


@register("attend", "rocket", paper="arXiv:2502.14051", cost="2·d per page, of which c are read")
@dataclass(frozen=True)
class Rocket(Reader):
    """While decoding, read pages of `tokens` / 2 slots, chosen by the channels in which queries are largest.

    Per KV head, with s the sign of the sum of its group's queries, a page is judged by one key k: its largest values
    where s > 0, its smallest elsewhere. The C = D * tokens / M channels (at most D) of largest mean |q| give each query
    head

        z = sum_C q k / sqrt(D * sum_C |q| / sum_D |q|)          weight of a page = slots * exp(z) / sum over pages

    and the W = ceil(tokens / 2 / page size) pages of largest weight, averaged over the group, are read whole. C is the
    paper's D * P / rho for pages of P slots and rho = M * P / tokens: looking costs it as much as reading.

    Differences from the reference: the page size is the cache's, not ceil(sqrt(rho)); whole pages are read, where the
    reference may cut the last one; the latest tokens are read from the open block, on top. Its multi-turn form filters
    a copy of the cache anew in every turn; here, without a size, every page competes at every step. Stats counts the C
    numbers looked at of each page; a GPU fetches memory in pieces of 32 bytes, in which neighbours of a channel come
    along.
    """

    chooses: ClassVar[bool] = True

    tokens: int = 1024
    skip_layers: int = 0

    def validate(self) -> str | None:
        return None if self.tokens else "tokens is at least 1, not 0; leave rocket out to read everything"

    def at(self, layer: int) -> Reader:
        return All() if layer < self.skip_layers else self

    def summaries(self, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("bounds", kv_dtype, 2 * head_dim),)  # smallest, then largest: either is read by itself

    def summarise(self, k_MPD: Tensor, used_MP: Tensor) -> dict[str, Tensor]:
        found = Quest().summarise(k_MPD, used_MP)
        return {"bounds": torch.cat((found["min"], found["max"]), dim=-1)}

    def looked_bytes(self, head_dim: int, kv_dtype: torch.dtype, num_pages: int) -> int:
        return self.num_channels(head_dim, num_pages) * kv_dtype.itemsize

    def num_channels(self, head_dim: int, num_pages: int) -> int:
        """C."""
        return max(1, min(head_dim, head_dim * self.tokens // num_pages))

    def num_pages(self, page_size: int) -> int:
        return -(-self.tokens // (2 * page_size))

    def select(self, view: PageView) -> Tensor:
        num_heads, _, num_queries, head_dim = view.q_HGTD.shape
        num_channels = self.num_channels(head_dim, view.used_HM.shape[1])
        weight_HTM = torch.empty(num_heads, num_queries, view.used_HM.shape[1], device=view.q_HGTD.device)
        for t in range(num_queries):  # a draft is short, and each of its tokens looks at channels of its own
            weight_HTM[:, t] = page_weights(view.q_HGTD[:, :, t], view.summaries, view.used_HM, num_channels)
        # A page of no slot has weight 0, and so may a real one that lies far below the best.
        return weight_HTM.masked_fill((view.used_HM == 0).unsqueeze(1), -1.0).topk(view.num_pages).indices


def page_weights(q_HGD: Tensor, summaries: Summaries, used_HM: Tensor, num_channels: int) -> Tensor:
    """Share [H, M] of the attention that each page is expected to get, averaged over the group."""
    q_HGD, head_dim = q_HGD.float(), q_HGD.shape[-1]
    channel_HC = q_HGD.abs().mean(1).topk(num_channels, sorted=False).indices
    q_HGC = q_HGD.gather(2, channel_HC.unsqueeze(1).expand(-1, q_HGD.shape[1], -1))
    is_up_HC = q_HGD.sum(1).gather(1, channel_HC) > 0
    k_HMC = summaries.read("bounds", channel_HC + head_dim * is_up_HC).float()
    share_HG = q_HGC.abs().sum(-1) / q_HGD.abs().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    heat_HG1 = math.sqrt(head_dim) * share_HG.clamp(min=torch.finfo(torch.float32).tiny).sqrt().unsqueeze(-1)
    score_HGM = (q_HGC @ k_HMC.mT) / heat_HG1 + used_HM.unsqueeze(1).log()
    return score_HGM.masked_fill((used_HM == 0).unsqueeze(1), -torch.inf).softmax(-1).mean(1)
