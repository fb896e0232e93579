"""`recall`: evicted slots are offloaded to the host in pages, and each read copies the best pages back.

A summary of each page stays on the device: the smallest and largest value of every key channel, as in Quest
(arXiv:2406.10774). No key of the page can score higher than sum_d max(q_d * min_d, q_d * max_d). ArkVale (NeurIPS 2024)
recalls pages by such boxes, InfLLM (arXiv:2402.04617) blocks of the distant past for streams of any length, SentenceKV
(arXiv:2504.00970) sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvfold.evicted.base import Evicted, PagedRecall
from kvfold.policy.registry import register


@register(
    "evicted", "recall", paper="arXiv:2402.04617", cost="2·d per page, tokens·d copied per step",
    published="differs: pages by bounds of their keys, for one read",
)  # fmt: skip
@dataclass(frozen=True)
class Recall(Evicted):
    """Evicted slots go to the host in pages; every read brings the pages of about `tokens` slots back that fit best.

    weight of a page = mean over the queries of softmax over pages of (bound * scale), with the bound of the module's
    head, and W = max(1, tokens // page) pages of largest weight are read by each KV head, beside all that is stored. A
    decoded token chooses by its own queries, those of the group; the tokens of a prompt's piece choose together.

    Slots are kept on the host as a reader saw them, in the cache's dtype. A page holds up to `page` slots that were
    evicted at once, in order of position; with `unit=sentence` it also ends where a sentence does. Keys keep their true
    positions. With `slot` the slots of a page stand side by side just before all that is stored, as if nothing lay
    between: no distance grows with the sequence (InfLLM gives all of them one position).

    Against ArkVale: pages are brought back for one read, not exchanged for others; boxes are not shrunk to their
    centres. Against SentenceKV: bounds in place of mean keys, and queries of the step in place of running means.
    """

    tokens: int = 512
    page: int = 16
    unit: Literal["page", "sentence"] = "page"

    def validate(self) -> str | None:
        if self.tokens < 1:
            return "tokens is at least 1, not 0; use drop to recall nothing"
        return None if 1 <= self.page <= 1024 else f"page is a number from 1 to 1024, not {self.page}"

    @property
    def recall(self) -> PagedRecall:
        return PagedRecall(self.page, max(1, self.tokens // self.page), self.unit)
