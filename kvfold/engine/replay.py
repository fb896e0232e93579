"""Replay: KVzip's context reconstruction, run over the uncompressed prompt cache before anything is evicted.

Chunk by chunk the model is prompted to repeat the context, with teacher forcing; replay scorers use the attention of
these passes. Each repetition starts at the position after the prompt and is not appended to the KV cache. Policies over
the same prompt share one replay, and one self-study (engine/self_study.py) where they need it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from kvfold.compression.full_prompt import FullPrompt
from kvfold.engine.self_study import study
from kvfold.evicted.base import CalibrationTargets
from kvfold.models.hidden_norms import hidden_norms
from kvfold.models.pass_cache import Call, PassCache, Piece
from kvfold.models.repeat_prompt import repeat_request, rotary_kept
from kvfold.passes.prefill import PrefillPass
from kvfold.passes.replay import ReplayPass
from kvfold.score.base import Replay


class ReplayRunner:
    """Replays over one model; `call` runs it, and at most `piece_len` queries attend at a time."""

    def __init__(self, hf: Any, call: Call, piece_len: int) -> None:
        self.hf = hf
        self.call = call
        self.piece_len = piece_len

    def run(
        self, current: PrefillPass, tokens: Sequence[Sequence[int]], surprises: Sequence[Tensor] | None = None
    ) -> None:
        """Replay the full prompts and select in the rounds that await it; `surprises` of each sequence's tokens, if a
        round needs them."""
        for index, prompt in current.full_prompts.items():
            studied: dict[int, list[CalibrationTargets | None]] = {}
            for kinds in _by_chunk(current, index):
                replay = ReplayPass(prompt, kinds, None if surprises is None else surprises[index])
                self._replay(replay, tokens[index])
                for kind in kinds:
                    targets = replay.targets(kind)
                    if kind.study:
                        if kind.study not in studied:
                            studied[kind.study] = self._study(prompt, kind.study)
                        targets = _joined(targets, studied[kind.study])
                    current.select_after_replay(index, kind, replay.maxima(kind), targets)

    def _study(self, prompt: FullPrompt, num_tokens: int) -> list[CalibrationTargets | None]:
        with rotary_kept(self.hf):
            return study(self.hf, self.call, prompt, num_tokens)

    def _replay(self, replay: ReplayPass, tokens: Sequence[int]) -> None:
        chunk_len = replay.kinds[0].chunk

        def note(norm_T: Tensor) -> None:
            replay.hidden_norm_T = norm_T

        with ExitStack() as stack:
            stack.enter_context(rotary_kept(self.hf))
            if replay.needs_hidden_norms:
                stack.enter_context(hidden_norms(self.hf, note))
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
    found: dict[int, list[Replay]] = defaultdict(list)
    for kind in kinds:
        found[kind.chunk].append(kind)
    return list(found.values())


def _joined(
    targets: list[CalibrationTargets | None], more: list[CalibrationTargets | None]
) -> list[CalibrationTargets | None]:
    pairs = zip(targets, more, strict=True)
    return [None if one is None or other is None else one.joined(other) for one, other in pairs]
