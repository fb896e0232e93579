"""`kvzip`: question-agnostic score by context reconstruction (KVzip, arXiv:2505.23416), and `kvzip_plus`, its weights
times the norm of projected values (KVzip+, arXiv:2601.07891).

Slots are scored by the attention of the model while it repeats the prompt: a cache that the whole text can be repeated
from serves every later question. The prompt is read a second time for it (replay).

    R rows   S slots   G query heads per KV head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.attention import output_norms
from kvfold.score.base import Needs, Replay, Scorer, View, given


@register(
    "score", "kvzip", paper="arXiv:2505.23416", cost="a second prefill, the whole cache held",
    published="differs: a system prompt is scored like the rest (pin it); budget `global`",
)  # fmt: skip
@dataclass(frozen=True)
class KVzip(Scorer):
    """Keep what the model attends to while it repeats the text; no question needed, pair it with `global`.

    score = maximum over group and queries of softmax(q k^T * scale), the queries being a request to repeat the text
    and the text again, `chunk` tokens of it at a time (later chunks are asked for by the last 8 tokens before them),
    the softmax over what was stored before the prompt, the first `sinks` tokens, the chunk and the repetition so far.
    The sinks are +inf.

    With `surprise` a query counts by what it is about to repeat: its weights are multiplied by min(1, s / surprise),
    s = -ln p of that token in the first reading. What the model would have said anyway needs no slots.

    A second `extend` repeats only what is new; what was stored before is scored by the attention it receives then.

    Against the authors' code: chunks of 2000 there, 2048 here as in kvpress; a system prompt is repeated like the rest,
    not kept by rule (pin it). Against kvpress: the tokens before the user's text are scored, not dropped first;
    evicted slots are gone, not masked.
    """

    chunk: int = 2048
    sinks: int = 4
    surprise: float = 0.0  # nats from which on a query counts in full; 0: every one does
    least = (("chunk", 1), ("sinks", 0), ("surprise", 0.0))

    @property
    def needs(self) -> Needs:
        replay = Replay(self.chunk, self.sinks, surprise=self.surprise)
        return Needs(sinks=self.sinks, replay=replay, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        largest_RS = given("kvzip", view.replay_RGS, "replay_RGS").amax(1)
        return view.masked(largest_RS.masked_fill(view.position_RS < self.sinks, torch.inf))


@register(
    "score", "kvzip_plus", paper="arXiv:2601.07891", cost="a second prefill, the whole cache held; L·d·M",
    published="as published in kvpress; a system prompt as for `kvzip`",
)  # fmt: skip
@dataclass(frozen=True)
class KVzipPlus(Scorer):
    """Keep what changes hidden states most while the model repeats the text; pair it with `global`.

    score = maximum over group and queries of a |v W_o|_2 / |h|, with a the weight that `kvzip` takes the maximum of,
    W_o the output projection of the query's head, and h the hidden state that attention was given for the query. The
    sinks are +inf.

    As kvpress' KVzipPress with its normalisation on; differences as for `kvzip`.
    """

    chunk: int = 2048
    sinks: int = 4
    least = (("chunk", 1), ("sinks", 0))

    @property
    def needs(self) -> Needs:
        replay = Replay(self.chunk, self.sinks, by_hidden=True)
        return Needs(sinks=self.sinks, replay=replay, output=True, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        largest_RGS = given("kvzip_plus", view.replay_RGS, "replay_RGS")
        change_RS = (largest_RGS * output_norms("kvzip_plus", view, 2)).amax(1)
        return view.masked(change_RS.masked_fill(view.position_RS < self.sinks, torch.inf))
