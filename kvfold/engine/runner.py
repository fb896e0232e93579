"""The only place that calls the model. It takes a batch of sequences, packed along the token axis.

Prefill is layer-major: one forward over all new tokens in which every decoder layer runs its tokens chunk by chunk,
then scores and drops before the next layer runs. `between_chunks` policies run the same pass once per chunk
(token-major), in bounded memory (chunks.py).

    packed tokens:  | sequence 0: chunk, chunk, … | sequence 1: chunk, … |
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvfold.compress.observe import ObserverNeeds, ObserverSnapshot, forget_prompt
from kvfold.compress.seal import prepare_seals
from kvfold.core import HAS_TRITON, Compile, ModelSpec
from kvfold.engine.chunked_prefill import default_chunk_len, passes, pieces
from kvfold.engine.cuda_graphs import cuda_graphs_of
from kvfold.engine.layer_major import LayerMajor, Progress
from kvfold.engine.logprobs import next_logprobs, surprise
from kvfold.engine.replay import ReplayRunner
from kvfold.engine.verify import Verified, commit_run
from kvfold.errors import InputError, ModelError
from kvfold.models.attach import is_attached, layers_wrapped, maskless
from kvfold.models.fused_layers import fused
from kvfold.models.pass_cache import DecodeCache, PassCache
from kvfold.models.sentences import check_sentences, note_sentences
from kvfold.models.spec import output_head
from kvfold.pages.arena import Arena
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy
from kvfold.policy.size import Percent
from kvfold.triggers import BetweenChunks

__all__ = ["Progress", "Runner"]


class Runner:
    """Runs prompts and decode steps of one attached model over one arena."""

    def __init__(
        self, hf: Any, spec: ModelSpec, arena: Arena, *, chunk_len: int | None = None, compile: Compile = "auto"
    ) -> None:
        if chunk_len is not None and chunk_len < 1:
            raise InputError(f"chunk_len is {chunk_len}; it must be at least 1")
        self.hf = hf
        self.spec = spec
        self.arena = arena
        self.chunk_len = default_chunk_len(spec, arena.device) if chunk_len is None else chunk_len
        self.graphs = cuda_graphs_of(hf, compile) if arena.device.type == "cuda" and HAS_TRITON else None

    @property
    def setup_s(self) -> float:
        """Seconds that capturing and compiling decode steps of this model have taken so far."""
        return 0.0 if self.graphs is None else self.graphs.setup_s

    def new_sequence(self, policy: Policy, config: PageConfig | None = None) -> SequenceCache:
        check_sentences(self.hf, policy)
        return SequenceCache(self.arena, self.spec, policy, config or PageConfig())

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[SequenceCache],
        tokens: Sequence[Sequence[int]],
        *,
        compress: bool = True,
        progress: Progress | None = None,
    ) -> Tensor:
        """Read new tokens; logits [batch, vocab] after the last token of each sequence. Drafts are rolled back.

        An interrupted pass leaves its sequences as they were; chunks that `between_chunks` finished before stay read.
        """
        self._check(sequences, tokens)
        seen = _seen_lens(sequences, tokens)
        for sequence in sequences:
            sequence.open.rollback()
        logits: list[Tensor | None] = [None] * len(sequences)
        for batch, parts in passes(sequences, tokens, compress):
            out = self._forward(
                [sequences[i] for i in batch], parts, [seen[i] for i in batch], compress=compress, progress=progress
            )
            for i, row in zip(batch, out, strict=True):
                logits[i] = row
        if compress:
            for sequence in sequences:
                forget_prompt(sequence)
        return torch.stack([row for row in logits if row is not None]).float()

    @torch.inference_mode()
    def prefill_many(
        self, sequences: Sequence[SequenceCache], tokens: Sequence[int], *, progress: Progress | None = None
    ) -> Tensor:
        """Read the same tokens into several empty sequences of different policies: one forward serves all.

        Logits [sequences, vocab] after the last token. Sequences that leave tokens behind between layers share one
        with those that leave the same; those that compress between chunks run on their own.
        """
        if any(sequence.logical_len for sequence in sequences) or not sequences:
            raise InputError("prefill_many fills one or more empty sequences; use prefill to continue one")
        self._check([sequences[0]], [tokens])
        seen = _seen_lens([sequences[0]], [tokens])
        logits: dict[int, Tensor] = {}
        together: dict[object, list[int]] = {}
        for i, sequence in enumerate(sequences):
            if isinstance(sequence.policy.prefill.when, BetweenChunks):
                logits[i] = self.prefill([sequence], [tokens])[0]
            else:
                together.setdefault(_left_behind_by(sequence.policy), []).append(i)
        for shared in together.values():
            first, *others = [sequences[i] for i in shared]
            out = self._forward([first], [tokens], seen, compress=True, progress=progress, followers=others)
            progress = None  # the tokens have been counted
            for i in shared:
                forget_prompt(sequences[i])
                logits[i] = out[0].float()
        return torch.stack([logits[i] for i in range(len(sequences))])

    @torch.inference_mode()
    def logprobs(
        self, sequence: SequenceCache, tokens: Sequence[int], *, compress: bool = True, progress: Progress | None = None
    ) -> Tensor:
        """Read tokens and return log p(tokens[i + 1] | …tokens[i]), one fewer than tokens, fp32."""
        self._check([sequence], [tokens])
        seen = _seen_lens([sequence], [tokens])
        sequence.open.rollback()
        if compress and sequence.policy.token_pruning.prunes:
            raise InputError(
                f'policy "{sequence.policy.short}" leaves tokens behind, which have no probabilities then; use dense'
            )
        head = output_head(self.hf)
        found, at = [], 0
        for _, (part,) in passes([sequence], [tokens], compress):
            hidden_TM = self._forward([sequence], [part], seen, compress=compress, progress=progress, hidden=True)
            found.append(next_logprobs(head, hidden_TM, tokens[at + 1 : at + 1 + len(part)]))
            at += len(part)
        if compress:
            forget_prompt(sequence)
        return torch.cat(found)

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
        """Tokens that are worth verifying in one pass."""
        return sys.maxsize if self.graphs is None else self.graphs.most_tokens(sequence)

    @torch.inference_mode()
    def verify(self, sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> list[Verified]:
        """Several tokens for each sequence, the last sampled one and a draft of what may follow, in one pass.

        None of them is in the cache until it is kept. A pass never crosses the point where the open block seals: what
        the tokens see is what they would have seen one by one.
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
            rows_NV = self._plain(step, tokens)
        rows = rows_NV.split(step.num_tokens)
        return [Verified(step, index, logits_TV) for index, logits_TV in enumerate(rows)]

    @torch.inference_mode()
    def launch(self, sequences: Sequence[SequenceCache], token_B: Tensor) -> Tensor:
        """One token of the device for each sequence, which a captured step reads there: the host does not wait for it.
        Logits [batch, vocab]; a token is not in its cache until it is kept. Of sequences that note no sentences."""
        step = DecodePass.begin(sequences)
        logits_BV = self._captured(step, token_B, stays=False)
        return self._plain(step, token_B.unsqueeze(-1).tolist()) if logits_BV is None else logits_BV

    def _captured(
        self, step: DecodePass, tokens: Sequence[Sequence[int]] | Tensor, *, stays: bool = True
    ) -> Tensor | None:
        """Logits [packed tokens, vocab] from a captured graph, where there is one; it observes what it runs."""
        if self.graphs is None:
            return None
        logits_NV = self.graphs.decode(self.hf, step.sequences, tokens, stays=stays)
        prepare_seals(step.sequences)  # while the device runs it
        return logits_NV

    def _observed(self, step: DecodePass, tokens: Sequence[Sequence[int]]) -> Tensor:
        """A plain pass that notes what it saw for the scorers, all of it or nothing."""
        undo = ObserverSnapshot(step.sequences)
        try:
            logits = self._plain(step, tokens)
            step.observe_all()
        except BaseException:
            undo.restore()
            raise
        return logits

    def _plain(self, step: DecodePass, tokens: Sequence[Sequence[int]]) -> Tensor:
        positions = [s.logical_len + t for s, ids in zip(step.sequences, tokens, strict=True) for t in range(len(ids))]
        packed = [token for ids in tokens for token in ids]
        with maskless():
            out = self._call(packed, positions, DecodeCache(step))
        logits: Tensor = out.logits[0].float()
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

    def _forward(
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
        """One layer-major pass, and a second reading where a policy asks for it; if they do not come to their end, the
        sequences are as they were."""
        lens = [len(ids) for ids in tokens]
        current = PrefillPass.begin(sequences, lens, seen_lens, compress=compress, followers=followers)
        undo = ObserverSnapshot([*sequences, *followers])
        try:
            out = self.read(current, tokens, progress, hidden=hidden)
            current.finish()
        except BaseException:
            current.release()
            undo.restore()
            raise
        return out

    def read(
        self,
        current: PrefillPass,
        tokens: Sequence[Sequence[int]],
        progress: Progress | None = None,
        *,
        hidden: bool = False,
    ) -> Tensor:
        """The model over the tokens of a pass, twice where one of its rounds waits for that; nothing is written yet.

        Logits [batch, vocab] after the last tokens; `hidden` stops at the last hidden states, [packed tokens, M].
        """
        followers = [follower for follower, _ in current.followers]
        note_sentences(self.hf, [*current.sequences, *followers], [*tokens, *([tokens[0]] * len(followers))])
        head = output_head(self.hf) if current.needs_surprise else None
        out = self._layer_major(current, tokens, progress, hidden=hidden or head is not None)
        surprises = None
        if head is not None:
            parts = out.split(current.num_tokens)
            surprises = [surprise(head, part_TM, ids) for part_TM, ids in zip(parts, tokens, strict=True)]
            out = out if hidden else head(torch.stack([part_TM[-1] for part_TM in parts]))
        if current.full_prompts:
            with maskless():
                ReplayRunner(self.hf, partial(self._call, hidden=True), self.chunk_len).run(current, tokens, surprises)
        return out

    def _layer_major(
        self, current: PrefillPass, tokens: Sequence[Sequence[int]], progress: Progress | None, *, hidden: bool
    ) -> Tensor:
        """The model over all tokens, each layer over all of them before the next."""
        device, lens = self.arena.device, current.num_tokens
        ends = None if hidden else torch.tensor(lens, device=device).cumsum(0) - 1
        cut = list(pieces(current.sequences, tokens, self.chunk_len))
        order = LayerMajor(current, cut, progress, self.spec.num_layers, ends)
        starts = [sequence.sealed_len for sequence in current.sequences]
        positions = torch.cat([torch.arange(s, s + n, device=device) for s, n in zip(starts, lens, strict=True)])
        ids = [token for part in tokens for token in part]
        with maskless(), layers_wrapped(self.hf, order.wrap):
            out = self._call(ids, positions, order.cache, hidden=hidden)
        found: Tensor = (out.last_hidden_state if hidden else out.logits)[0]
        return found

    def _call(
        self,
        ids: Sequence[int],
        positions: Sequence[int] | Tensor,
        cache: PassCache | DecodeCache,
        *,
        hidden: bool = False,
    ) -> Any:
        if not is_attached(self.hf):
            raise ModelError("the model was detached from kvfold; call kvfold.attach(model) before using it again")
        device = self.arena.device
        model = self.hf.base_model if hidden else self.hf
        with fused(self.hf):
            return model(
                input_ids=torch.tensor([list(ids)], device=device),
                position_ids=torch.as_tensor(positions, device=device).unsqueeze(0),
                past_key_values=cache,
                use_cache=True,
            )


def _left_behind_by(policy: Policy) -> object:
    """All that decides which tokens of a prompt are left behind between layers; None: every token stays."""
    if not policy.token_pruning.prunes:
        return None
    stage = policy.prefill
    share_of = stage.size if isinstance(stage.protect.recent, Percent) else None
    return policy.token_pruning, stage.protect, share_of, ObserverNeeds.of([policy], decoding=False).last_queries


def _seen_lens(sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> list[int]:
    """Committed lengths once these tokens are read."""
    return [sequence.committed_len + len(ids) for sequence, ids in zip(sequences, tokens, strict=True)]
