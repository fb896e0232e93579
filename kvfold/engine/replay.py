"""Replay: KVzip's context reconstruction, run over the uncompressed prompt cache before anything is evicted.

Chunk by chunk the model is prompted to repeat the context, with teacher forcing; replay scorers use the attention of
these passes. Each repetition starts at the position after the prompt and is not appended to the KV cache. Policies over
the same prompt share one replay, and one self-study where they need it: the model answers generic questions about the
prompt, all in one batch, greedily. Their queries resemble a user's, while those of a replay only predict the next word.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kvfold.compression.full_prompt import FullPrompt
from kvfold.evicted.base import CalibrationTargets
from kvfold.models.pass_cache import Call, PassCache, Piece
from kvfold.models.repeat_prompt import hidden_norms, question_ids, repeat_request, rotary_kept
from kvfold.models.spec import output_head
from kvfold.passes.prefill import PrefillPass
from kvfold.passes.probe import SelfStudyPass
from kvfold.passes.replay import ReplayPass
from kvfold.score.base import Replay


def study(hf: Any, call: Call, prompt: FullPrompt, num_tokens: int) -> list[CalibrationTargets | None]:
    """Per layer, the queries of the questions and of answers of at most `num_tokens` tokens each; `call` runs the model
    without its output head."""
    new, head = question_ids(hf), output_head(hf)
    lengths = [0] * len(new)
    current = SelfStudyPass(prompt, max(map(len, new)) + num_tokens)
    for _ in range(num_tokens):
        new = _next(call, head, current, new, lengths)
        ends = prompt.sequence.spec.eos_token_ids
        new = [[] if ids and ids[0] in ends else ids for ids in new]
        if not any(new):
            break
    return current.targets()


def _next(
    call: Call, head: torch.nn.Module, current: SelfStudyPass, new: Sequence[Sequence[int]], lengths: list[int]
) -> list[list[int]]:
    """Run the new tokens of each question; returns the argmax token after each."""
    ids, positions, pieces = list[int](), list[int](), list[Piece]()
    for index, mine in enumerate(new):
        if mine:
            begin = current.prompt.end + lengths[index]
            pieces.append(Piece(index, len(ids), len(ids) + len(mine)))
            ids += mine
            positions += range(begin, begin + len(mine))
            lengths[index] += len(mine)
    hidden_NM = call(ids, positions, PassCache(current, pieces)).last_hidden_state[0]
    ends = torch.tensor([piece.end - 1 for piece in pieces], device=hidden_NM.device)
    tokens = head(hidden_NM[ends]).argmax(-1).tolist()
    found: list[list[int]] = [[] for _ in new]
    for piece, token in zip(pieces, tokens, strict=True):
        found[piece.index] = [token]
    return found


@dataclass(frozen=True)
class ReplayRunner:
    """Replays over one model; `call` runs it, and at most `piece_len` queries attend at a time."""

    hf: Any
    call: Call
    piece_len: int

    def run(
        self, current: PrefillPass, tokens: Sequence[Sequence[int]], surprises: Sequence[Tensor] | None = None
    ) -> None:
        """Replay the full prompts and select in the rounds that await it; `surprises` of each sequence's tokens, if a
        round needs them."""
        for index, prompt in current.full_prompts.items():
            study_once = cache(partial(self._study, prompt))
            for kinds in _by_chunk(current, index):
                replay = ReplayPass(prompt, kinds, None if surprises is None else surprises[index])
                self._replay(replay, tokens[index])
                for kind in kinds:
                    targets = replay.targets(kind)
                    if kind.study:
                        targets = _joined(targets, study_once(kind.study))
                    current.select_after_replay(index, kind, replay.maxima(kind), targets)

    def _study(self, prompt: FullPrompt, num_tokens: int) -> list[CalibrationTargets | None]:
        with rotary_kept(self.hf):
            return study(self.hf, self.call, prompt, num_tokens)

    def _replay(self, replay: ReplayPass, tokens: Sequence[int]) -> None:
        chunk_len = replay.kinds[0].chunk
        note = partial(setattr, replay, "hidden_norm_T")
        with rotary_kept(self.hf), hidden_norms(self.hf, note) if replay.needs_hidden_norms else nullcontext():
            for begin in range(0, len(tokens), chunk_len):
                self._repeat(replay, tokens, slice(begin, min(begin + chunk_len, len(tokens))))

    def _repeat(self, replay: ReplayPass, tokens: Sequence[int], chunk: slice) -> None:
        ids = [*repeat_request(self.hf).before(tokens[: chunk.start]), *tokens[chunk]]
        positions = range(replay.prompt.end, replay.prompt.end + len(ids))
        begins = range(0, len(ids), self.piece_len)
        pieces = [Piece(0, begin, min(begin + self.piece_len, len(ids))) for begin in begins]
        replay.begin(chunk, len(ids))
        self.call(ids, positions, PassCache(replay, pieces))


def _by_chunk(current: PrefillPass, index: int) -> list[list[Replay]]:
    """Kinds of replay that rounds await, grouped by chunk length: each group shares a reading."""
    kinds = dict.fromkeys(round_.replay for round_ in current.awaiting_replay(index) if round_.replay is not None)
    return [[kind for kind in kinds if kind.chunk == chunk] for chunk in dict.fromkeys(kind.chunk for kind in kinds)]


def _joined(
    targets: list[CalibrationTargets | None], more: list[CalibrationTargets | None]
) -> list[CalibrationTargets | None]:
    pairs = zip(targets, more, strict=True)
    return [None if one is None or other is None else one.joined(other) for one, other in pairs]
