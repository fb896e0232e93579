"""The model runner: prefill, decode and verification of a batch of sequences, packed along the token axis.

Prefill is layer-major: one forward over all new tokens in which every decoder layer runs its tokens chunk by chunk,
then scores and evicts before the next layer runs. `between_chunks` policies run the same pass once per chunk
(token-major), in bounded memory (chunked prefill: layer_major.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvfold.compression.observe import ObserverNeeds, ObserverSnapshot, forget_prompt
from kvfold.compression.seal import prepare_seals
from kvfold.core import HAS_TRITON, Compile, ModelSpec
from kvfold.engine.cuda_graphs import cuda_graphs_of
from kvfold.engine.forward import Forward, next_logprobs, surprise
from kvfold.engine.layer_major import Progress, default_chunk_len, passes
from kvfold.engine.replay import ReplayRunner
from kvfold.engine.verify import Verified, commit_run
from kvfold.errors import InputError
from kvfold.models.attach import ModuleState, maskless
from kvfold.models.sentences import check_sentences, note_sentences
from kvfold.models.spec import output_head
from kvfold.pages.arena import Arena
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy
from kvfold.policy.size import Percent
from kvfold.yielding import held

P = ParamSpec("P")
R = TypeVar("R")
_locks: ModuleState[Any] = ModuleState("lock")


def _exclusive(method: Callable[P, R]) -> Callable[P, R]:
    """One call of a model at a time, whatever thread makes it: its layers are replaced and wrapped meanwhile."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        runner: Any = args[0]
        with held(runner._lock):
            return method(*args, **kwargs)

    return run


class Runner:
    """Runs prompts and decode steps of one attached model over one arena. `joins`: whether short prompts run through a
    layer in one call, which rounds otherwise than one after another; always so on CUDA."""

    def __init__(
        self,
        hf: Any,
        spec: ModelSpec,
        arena: Arena,
        *,
        chunk_len: int | None = None,
        compile: Compile = "auto",
        joins: bool = False,
    ) -> None:
        if chunk_len is not None and chunk_len < 1:
            raise InputError(f"chunk_len is {chunk_len}; it must be at least 1")
        self.hf = hf
        self.spec = spec
        self.arena = arena
        self._lock = _locks.made(hf, RLock)
        self.chunk_len = default_chunk_len(spec, arena.device) if chunk_len is None else chunk_len
        is_cuda = arena.device.type == "cuda"
        self.joined_len = self.chunk_len if joins or is_cuda else 0  # tokens of several prompts in one call of a layer
        self.pass_len = self.joined_len * (2 if is_cuda else 1)  # and in one pass, while nothing decodes
        self._forward = Forward(hf, spec.num_layers, arena.device)
        self.graphs = cuda_graphs_of(hf, compile) if arena.device.type == "cuda" and HAS_TRITON else None

    @property
    def setup_s(self) -> float:
        """Seconds spent on CUDA graph capture and compilation of this model's decode steps so far."""
        return 0.0 if self.graphs is None else self.graphs.setup_s

    def new_sequence(self, policy: Policy, config: PageConfig | None = None) -> SequenceCache:
        check_sentences(self.hf, policy)
        return SequenceCache(self.arena, self.spec, policy, config or PageConfig())

    @_exclusive
    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[SequenceCache],
        tokens: Sequence[Sequence[int]],
        *,
        compress: bool = True,
        progress: Progress | None = None,
    ) -> Tensor:
        """Prefill new tokens; logits [batch, vocab] after the last token of each sequence. Drafts are rolled back.

        An interrupted pass leaves its sequences as they were; chunks that `between_chunks` has finished stay.
        """
        self._check(sequences, tokens)
        seen = _seen_lens(sequences, tokens)
        for sequence in sequences:
            sequence.open.rollback()
        logits: list[Tensor | None] = [None] * len(sequences)
        for batch, parts in passes(sequences, tokens, compress):
            out = self._prefill_pass(
                [sequences[i] for i in batch], parts, [seen[i] for i in batch], compress=compress, progress=progress
            )
            for i, row in zip(batch, out, strict=True):
                logits[i] = row
        if compress:
            for sequence in sequences:
                forget_prompt(sequence)
        return torch.stack([row for row in logits if row is not None]).float()

    @_exclusive
    @torch.inference_mode()
    def prefill_many(
        self, sequences: Sequence[SequenceCache], tokens: Sequence[int], *, progress: Progress | None = None
    ) -> Tensor:
        """Prefill the same tokens into several empty sequences of different policies in one forward.

        Logits [sequences, vocab] after the last token. Sequences whose policies prune tokens between layers share a
        forward only with those that prune the same; those that compress between chunks run on their own.
        """
        if any(sequence.logical_len for sequence in sequences) or not sequences:
            raise InputError("prefill_many fills one or more empty sequences; use prefill to continue one")
        self._check([sequences[0]], [tokens])
        seen = _seen_lens([sequences[0]], [tokens])
        logits: dict[int, Tensor] = {}
        together: dict[object, list[int]] = {}
        for i, sequence in enumerate(sequences):
            if sequence.policy.prefill.when.chunk_len is not None:
                logits[i] = self.prefill([sequence], [tokens])[0]
            else:
                together.setdefault(_pruning_key(sequence.policy), []).append(i)
        for shared in together.values():
            first, *others = [sequences[i] for i in shared]
            out = self._prefill_pass([first], [tokens], seen, compress=True, progress=progress, followers=others)
            progress = None  # the tokens have been counted
            for i in shared:
                forget_prompt(sequences[i])
                logits[i] = out[0].float()
        return torch.stack([logits[i] for i in range(len(sequences))])

    @_exclusive
    @torch.inference_mode()
    def logprobs(
        self, sequence: SequenceCache, tokens: Sequence[int], *, compress: bool = True, progress: Progress | None = None
    ) -> Tensor:
        """Prefill tokens and return log p(tokens[i + 1] | …tokens[i]), one fewer than tokens, fp32."""
        self._check([sequence], [tokens])
        seen = _seen_lens([sequence], [tokens])
        sequence.open.rollback()
        if compress and sequence.policy.token_pruning.prunes:
            raise InputError(
                f'policy "{sequence.policy.short}" prunes tokens between layers, so they have no log-probabilities; '
                "remove the token-pruning term"
            )
        head = output_head(self.hf)
        found, at = [], 0
        for _, (part,) in passes([sequence], [tokens], compress):
            hidden_TM = self._prefill_pass([sequence], [part], seen, compress=compress, progress=progress, hidden=True)
            found.append(next_logprobs(head, hidden_TM, tokens[at + 1 : at + 1 + len(part)]))
            at += len(part)
        if compress:
            forget_prompt(sequence)
        return torch.cat(found)

    @_exclusive
    @torch.inference_mode()
    def decode(
        self, sequences: Sequence[SequenceCache], tokens: Sequence[int], *, commit: Sequence[bool] | None = None
    ) -> Tensor:
        """One token for each sequence; logits [batch, vocab]. OutOfPages is raised before anything changes.

        `commit`: False leaves the token, and those drafted before it, open to `rollback`, until a later one is
        committed or the open block holds nothing but drafts.
        """
        parts = [[token] for token in tokens]
        self._check(sequences, parts)
        step = DecodePass.begin(sequences)
        note_sentences(self.hf, sequences, parts)
        logits = self._captured(step, parts)
        if logits is None:
            logits = self._observed(step, parts)
        step.finish()
        for sequence, commits in zip(sequences, commit or [True] * len(sequences), strict=True):
            commit_run(sequence, commits)
        return logits

    def most_verified(self, sequence: SequenceCache) -> int:
        """The most tokens of a sequence that are worth verifying in one pass."""
        return sys.maxsize if self.graphs is None else self.graphs.most_tokens(sequence)

    @_exclusive
    @torch.inference_mode()
    def verify(self, sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> list[Verified]:
        """Several tokens for each sequence, the last sampled one and a draft of what may follow, in one pass.

        A token enters the KV cache when it is accepted (`Verified.keep`). A pass never crosses the point where the open
        block seals, so each token attends to what it would have attended to in a step of its own.
        """
        self._check(sequences, tokens)
        lens = [len(ids) for ids in tokens]
        for sequence, length in zip(sequences, lens, strict=True):
            if length > sequence.open.next_room:
                raise InputError(f"{length} tokens to verify; {sequence.open.next_room} fit before the block seals")
        step = DecodePass.begin(sequences, lens)
        note_sentences(self.hf, sequences, tokens)
        rows_NV = self._captured(step, tokens, stays=False)
        if rows_NV is None:
            rows_NV = self._forward.decode(step, tokens)
        rows = rows_NV.split(step.num_tokens)
        return [Verified(step, index, logits_TV) for index, logits_TV in enumerate(rows)]

    @_exclusive
    @torch.inference_mode()
    def launch(self, sequences: Sequence[SequenceCache], token_B: Tensor) -> Tensor:
        """Launch a step on one device-side token for each sequence, without host synchronisation.

        Logits [batch, vocab]; a token enters the KV cache when it is kept. Not for policies that need sentences."""
        step = DecodePass.begin(sequences)
        logits_BV = self._captured(step, token_B, stays=False)
        return self._forward.decode(step, token_B.unsqueeze(-1).tolist()) if logits_BV is None else logits_BV

    def _captured(
        self, step: DecodePass, tokens: Sequence[Sequence[int]] | Tensor, *, stays: bool = True
    ) -> Tensor | None:
        """Logits [packed tokens, vocab] of a captured step, observers included; None where there is no CUDA graph."""
        if self.graphs is None:
            return None
        logits_NV = self.graphs.decode(self.hf, step.sequences, tokens, stays=stays)
        prepare_seals(step.sequences)  # while the device runs it
        return logits_NV

    def _observed(self, step: DecodePass, tokens: Sequence[Sequence[int]]) -> Tensor:
        """An eager pass whose attention the scorers observe, wholly or, if it raises, not at all."""
        undo = ObserverSnapshot(step.observing)
        try:
            logits = self._forward.decode(step, tokens)
            step.observe_all()
        except BaseException:
            undo.restore()
            raise
        return logits

    def _check(self, sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> None:
        if len(sequences) != len(tokens) or not sequences:
            raise InputError(f"{len(tokens)} inputs for {len(sequences)} sequences; give one each, at least one")
        if not all(tokens):
            raise InputError("the input holds no tokens; give at least one")
        low, high = min(map(min, tokens)), max(map(max, tokens))
        if low < 0 or high >= self.spec.vocab_size:
            bad = low if low < 0 else high
            raise InputError(f"token id {bad} is outside the vocabulary of {self.spec.vocab_size}")

    def _prefill_pass(
        self,
        sequences: Sequence[SequenceCache],
        tokens: Sequence[Sequence[int]],
        seen_lens: Sequence[int],
        *,
        compress: bool,
        progress: Progress | None,
        hidden: bool = False,
        followers: Sequence[SequenceCache] = (),
    ) -> Tensor:
        """One layer-major pass, with a replay where a policy needs one; if it raises, the sequences are as before."""
        lens = [len(ids) for ids in tokens]
        current = PrefillPass.begin(sequences, lens, seen_lens, compress=compress, followers=followers)
        undo = ObserverSnapshot([*sequences, *followers])
        try:
            out = self.run_pass(current, tokens, progress, hidden=hidden)
            current.finish()
        except BaseException:
            current.release()
            undo.restore()
            raise
        return out

    def run_pass(
        self,
        current: PrefillPass,
        tokens: Sequence[Sequence[int]],
        progress: Progress | None = None,
        *,
        hidden: bool = False,
        surprises: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Run the model over the tokens of a pass, and the replay that its rounds need; no slot is written yet.

        Logits [batch, vocab] after the last tokens; `hidden` stops at the last hidden states, [packed tokens, M].
        `surprises` of each sequence's tokens, for a replay that weighs queries by them, are computed unless given.
        """
        followers = [follower for follower, _ in current.followers]
        note_sentences(self.hf, [*current.sequences, *followers], [*tokens, *([tokens[0]] * len(followers))])
        head = output_head(self.hf) if current.needs_surprise and surprises is None else None
        all_hidden = hidden or head is not None
        out = self._forward.prefill(
            current, tokens, self.chunk_len, progress, joined_len=self.joined_len, hidden=all_hidden
        )
        if head is not None:
            parts = out.split(current.num_tokens)
            surprises = [surprise(head, part_TM, ids) for part_TM, ids in zip(parts, tokens, strict=True)]
            out = out if hidden else head(torch.stack([part_TM[-1] for part_TM in parts]))
        if current.full_prompts:
            with maskless():
                replay = ReplayRunner(self.hf, partial(self._forward.call, hidden=True), self.chunk_len)
                replay.run(current, tokens, surprises)
        return out


def _pruning_key(policy: Policy) -> object:
    """What decides which tokens of a prompt are pruned between layers; None: every token runs all layers."""
    if not policy.token_pruning.prunes:
        return None
    stage = policy.prefill
    share_of = stage.size if isinstance(stage.protect.recent, Percent) else None
    return policy.token_pruning, stage.protect, share_of, ObserverNeeds.of([policy], decoding=False).last_queries


def _seen_lens(sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> list[int]:
    """Committed lengths after these tokens."""
    return [sequence.committed_len + len(ids) for sequence, ids in zip(sequences, tokens, strict=True)]
