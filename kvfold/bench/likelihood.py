"""Log-likelihoods and generations over compressed caches: continuations, rolling texts, replies.

    context[:-1]   prefilled and compressed under the policy
    context[-1]    decoded over the compressed cache, then the continuation: no token is predicted from the full context

A text without a context runs in blocks: each is predicted over the compressed past and its own uncompressed beginning,
then compressed with the past. A context too short for the policy's size stays uncompressed, and is counted.

    B sequences   V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import Sampling
from kvfold.errors import InputError, SizeError
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.stats import measure

BLOCK_LEN = 512


class Likelihood(NamedTuple):
    """Of one continuation: the sum of its log-probabilities, and whether greedy decoding would write it."""

    logprob: float
    is_greedy: bool


class GenerateUntil(NamedTuple):
    """A generation up to a stop string."""

    context_ids: Sequence[int]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()


class PolicyLM:
    """One model under one policy."""

    def __init__(self, model: Model, policy: str, *, block_len: int = BLOCK_LEN) -> None:
        if block_len < 1:
            raise InputError(f"block_len is {block_len}; it must be at least 1")
        self.model = model
        self.policy = Policy.parse(policy)
        self.block_len = block_len
        self.num_read = 0  # contexts and blocks
        self.num_whole = 0  # of these, uncompressed: too short for the policy's size
        check_policy(self.policy, model.spec)
        self._runner = Runner(model.hf, model.spec, model.arena, compile=model.compile)

    def continuations(self, context_ids: Sequence[int], options: Sequence[Sequence[int]]) -> list[Likelihood]:
        """Every option over the same compressed context, prefilled once; all options are decoded as one batch."""
        if not context_ids or not options or not all(options):
            raise InputError("a continuation is judged after one token or more, and has one or more itself")
        with self._read(context_ids[:-1]) as sequence, ExitStack() as held:
            branches = [held.enter_context(_forked(sequence)) for _ in options]
            return self._judge(branches, context_ids[-1], options)

    def _judge(
        self, branches: Sequence[SequenceCache], last: int, options: Sequence[Sequence[int]]
    ) -> list[Likelihood]:
        total, greedy = [0.0] * len(options), [True] * len(options)
        for step in range(max(map(len, options))):
            live = [branch for branch, option in enumerate(options) if step < len(option)]
            fed = [options[branch][step - 1] if step else last for branch in live]
            logits_BV = self._runner.decode([branches[branch] for branch in live], fed)
            wanted_B = torch.tensor([options[branch][step] for branch in live], device=logits_BV.device)
            logprob_B = logits_BV.log_softmax(-1).gather(-1, wanted_B.unsqueeze(-1)).squeeze(-1)
            hit_B = logits_BV.argmax(-1) == wanted_B
            for branch, logprob, hit in zip(live, logprob_B.tolist(), hit_B.tolist(), strict=True):
                total[branch] += logprob
                greedy[branch] &= hit
        return [Likelihood(*found) for found in zip(total, greedy, strict=True)]

    def text(self, context_ids: Sequence[int], text_ids: Sequence[int]) -> float:
        """The log-probability of a text of any length after a few tokens, block by block."""
        if not context_ids or not text_ids:
            raise InputError("a text is judged after one token or more, and has one or more itself")
        ids, scored, found = [*context_ids, *text_ids], len(context_ids), 0.0
        with self._read(()) as past:
            for begin in range(0, len(ids) - 1, self.block_len):
                end = min(begin + self.block_len, len(ids) - 1)
                with _forked(past) as block:  # the next token included: it is the last one predicted
                    logprob_T = self._runner.logprobs(block, ids[begin : end + 1], compress=False)
                found += logprob_T[max(0, scored - begin - 1) :].double().sum().item()
                if end < len(ids) - 1:
                    self._extend(past, ids[begin:end])
        return found

    def replies(self, asked: Sequence[GenerateUntil]) -> list[str]:
        """Texts up to their stop strings; all are decoded as one batch."""
        with ExitStack() as held:
            sequences = [held.enter_context(self._read(ask.context_ids[:-1])) for ask in asked]
            logits_BV = self._runner.decode(sequences, [ask.context_ids[-1] for ask in asked])
            requests = [
                Request(sequence, logits_V, ask.max_new_tokens, ask.sampling, ask.stop)
                for sequence, logits_V, ask in zip(sequences, logits_BV, asked, strict=True)
            ]
            for _ in generate(self._runner, requests, self.model.tokenizer):
                pass
            return [request.text for request in requests]

    @contextmanager
    def _read(self, token_ids: Sequence[int]) -> Iterator[SequenceCache]:
        sequence = self._runner.new_sequence(self.policy)
        try:
            if token_ids:
                self._extend(sequence, token_ids)
            yield sequence
        finally:
            sequence.release()

    def _extend(self, sequence: SequenceCache, token_ids: Sequence[int]) -> None:
        self.num_read += 1
        try:
            self._runner.prefill([sequence], [token_ids])
        except SizeError:  # the size is below the protected slots
            self._runner.prefill([sequence], [token_ids], compress=False)
        if self.policy.prefill.size is not None and measure(sequence).mean_slots == sequence.logical_len:
            self.num_whole += 1


@contextmanager
def _forked(sequence: SequenceCache) -> Iterator[SequenceCache]:
    branch = sequence.fork()
    try:
        yield branch
    finally:
        branch.release()
