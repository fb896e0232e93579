"""Labels of windows: contexts are cached under a policy, then the labelled tokens of many windows run as one batch.

Keys and values of labelled tokens are needed by no later pass, so they are never stored: those of one layer exist at a
time. What the arena holds are compressed contexts, as many as fit; when one more does not, those that are held are
labelled and freed.

    N labelled tokens   n of them at once   K labels of a token   V vocabulary   M hidden dims   T tokens fed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvfold.compression.round import check_size
from kvfold.compression.view import size_facts
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, LogitsError
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.models.spec import output_head
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.prefill import LayerBuffer, PrefillPass
from kvfold.policy.policy import Policy
from kvfold.train.label_rows import LEAST, Rows, joined

_ROWS = 256  # of logits at once


@dataclass(frozen=True)
class LabelInput:
    """Tokens of a window: what is cached, what is fed behind it, and what the last of these predict."""

    cached: Sequence[int]
    fed: Sequence[int]  # each predicts the token after it
    next_ids: Sequence[int]  # of the last ones
    position: int  # of the first labelled token among the tokens of all texts


class LabelPass(PrefillPass):
    """A pass that stores nothing: its tokens attend to the cache and to each other."""

    def _observe(self, *_: object) -> None:
        pass

    def _select(self, index: int, layer: int, buffer: LayerBuffer) -> None:
        pass


class Labeller:
    """Labels under one policy."""

    def __init__(self, model: Model, policy: Policy, topk: int) -> None:
        if not 1 <= topk < model.spec.vocab_size:
            raise InputError(f"topk is {topk}; choose from 1 to {model.spec.vocab_size - 1}, below the vocabulary")
        _check_effect(policy)
        check_policy(policy, model.spec)
        self.policy, self.topk = policy, topk
        self.runner = Runner(model.hf, model.spec, model.arena, compile=False)
        self._head = output_head(model.hf)

    def check_context(self, num_tokens: int) -> None:
        """SizeError where a context of so many tokens would stay whole under the policy."""
        sample = self.runner.new_sequence(self.policy)
        try:
            check_size(sample, num_tokens)
        finally:
            sample.release()

    def keeps_all(self, num_tokens: int) -> bool:
        """Whether a context of so many tokens would be stored whole and exactly."""
        stage, is_lossy = self.policy.prefill, not all(codec.lossless for codec in self.policy.codec.codecs)
        if is_lossy or self.policy.token_pruning.prunes or (stage.size is not None and stage.budget.may_leave):
            return False
        if stage.size is None:
            return True
        sample = self.runner.new_sequence(self.policy)
        try:
            return stage.size.slots_per_head(size_facts(sample, num_tokens)) >= num_tokens
        finally:
            sample.release()

    def read(self, windows: Sequence[LabelInput]) -> list[SequenceCache]:
        """Compressed caches of the contexts, prefilled as one batch; empty where there is no context."""
        found: list[SequenceCache] = []
        try:
            for _ in windows:
                found.append(self.runner.new_sequence(self.policy))
            filled = [(cache, window.cached) for cache, window in zip(found, windows, strict=True) if window.cached]
            if filled:
                self.runner.prefill([cache for cache, _ in filled], [ids for _, ids in filled])
        except BaseException:
            for cache in found:
                cache.release()
            raise
        return found

    @torch.inference_mode()
    def label(self, windows: Sequence[LabelInput], caches: Sequence[SequenceCache]) -> Rows:
        """The labels of windows whose contexts are cached, in one pass."""
        tokens = [window.fed for window in windows]
        current = LabelPass.begin(caches, list(map(len, tokens)), compress=False)
        hidden = self.runner.run_pass(current, tokens, hidden=True).split(list(map(len, tokens)))
        return joined([self._rows(window, hidden_TM) for window, hidden_TM in zip(windows, hidden, strict=True)])

    def _rows(self, window: LabelInput, hidden_TM: Tensor) -> Rows:
        count = len(window.next_ids)
        next_N = torch.tensor(list(window.next_ids), device=hidden_TM.device)
        pairs = zip(hidden_TM[-count:].split(_ROWS), next_N.split(_ROWS), strict=True)
        parts = [top_labels(self._head, hidden_nM, next_n, self.topk) for hidden_nM, next_n in pairs]
        position_N = torch.arange(window.position, window.position + count)
        compressed_N = torch.full((count,), bool(window.cached))
        return Rows(position_N, compressed_N, *(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def top_labels(head: nn.Module, hidden_nM: Tensor, next_n: Tensor, topk: int) -> tuple[Tensor, ...]:
    """Ids and log-probabilities [n, K] of the most likely tokens, the log of the mass of all others [n], and the
    log-probability of the token that came [n]."""
    logits_nV = head(hidden_nM).float()
    total_n1 = logits_nV.logsumexp(-1, keepdim=True)
    if not bool(total_n1.isfinite().all()):
        raise LogitsError("the model computed NaN or infinite logits; its weights or their precision are at fault")
    top = logits_nV.topk(topk, dim=-1)
    top_nK = top.values - total_n1
    chosen_n = (logits_nV.gather(-1, next_n.unsqueeze(-1)) - total_n1).squeeze(-1)
    rest_n = logits_nV.scatter_(-1, top.indices, -torch.inf).logsumexp(-1) - total_n1.squeeze(-1)
    return top.indices.int(), top_nK.clamp(LEAST, 0.0).half(), rest_n.clamp(LEAST, 0.0), chosen_n.clamp(LEAST, 0.0)


def _check_effect(policy: Policy) -> None:
    """InputError for what one pass over a compressed context would not show."""
    if policy.shorten is not None:
        raise InputError(f'policy "{policy.short}" shortens texts, and labels are of all tokens; remove that term')
    if policy.attend.selects or policy.recall is not None:
        raise InputError(
            f'policy "{policy.short}" selects what it reads in decode steps, while labels come from one pass that '
            "reads all that is stored; remove the reader, or the recall"
        )
