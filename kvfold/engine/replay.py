"""Reading a prompt a second time, after its whole cache is there and before anything is evicted.

Chunk after chunk the model is asked to repeat the text, and repeats it word for word (its tokens are given, not
sampled); what it attends to meanwhile is what scorers that ask for a replay go by. Each repetition starts at the
position after the prompt, and nothing of it stays. Policies over the same prompt share one replay, and one self-study
(engine/self_study.py) where they want that too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from kvfold.compress.full_prompt import FullPrompt
from kvfold.engine.self_study import study
from kvfold.evicted.base import CalibrationTargets
from kvfold.models.hidden_norms import hidden_norms
from kvfold.models.pass_cache import Call, PassCache, Piece
from kvfold.models.repeat_prompt import repeat_request, rotary_kept
from kvfold.passes.prefill import PrefillPass
from kvfold.passes.replay import ReplayPass
from kvfold.score.base import Replay


class ReplayRunner:
    """The second readings of one model; `call` runs it, at most `piece_len` queries at a time attend."""

    def __init__(self, hf: Any, call: Call, piece_len: int) -> None:
        self.hf = hf
        self.call = call
        self.piece_len = piece_len

    def run(
        self, current: PrefillPass, tokens: Sequence[Sequence[int]], surprises: Sequence[Tensor] | None = None
    ) -> None:
        """Read again what is held, and let the rounds that wait for it look; `surprises` of each sequence's tokens,
        where a round asks for them."""
        for index, held in current.held.items():
            studied: dict[int, list[CalibrationTargets | None]] = {}
            for kinds in _by_chunk(current, index):
                again = ReplayPass(held, kinds, None if surprises is None else surprises[index])
                self._read(again, tokens[index])
                for kind in kinds:
                    asked = again.asked(kind)
                    if kind.study:
                        if kind.study not in studied:
                            studied[kind.study] = self._study(held, kind.study)
                        asked = _joined(asked, studied[kind.study])
                    current.look_again(index, kind, again.maxima(kind), asked)

    def _study(self, held: FullPrompt, num_tokens: int) -> list[CalibrationTargets | None]:
        with rotary_kept(self.hf):
            return study(self.hf, self.call, held, num_tokens)

    def _read(self, again: ReplayPass, tokens: Sequence[int]) -> None:
        chunk_len = again.kinds[0].chunk

        def note(norm_T: Tensor) -> None:
            again.hidden_norm_T = norm_T

        with ExitStack() as stack:
            stack.enter_context(rotary_kept(self.hf))
            if again.watches_hidden:
                stack.enter_context(hidden_norms(self.hf, note))
            for begin in range(0, len(tokens), chunk_len):
                self._repeat(again, tokens, slice(begin, min(begin + chunk_len, len(tokens))))

    def _repeat(self, again: ReplayPass, tokens: Sequence[int], chunk: slice) -> None:
        ids = [*repeat_request(self.hf).before(tokens[: chunk.start]), *tokens[chunk]]
        positions = range(again.held.end, again.held.end + len(ids))
        begins = range(0, len(ids), self.piece_len)
        pieces = [Piece(0, begin, min(begin + self.piece_len, len(ids))) for begin in begins]
        again.begin(chunk, len(ids))
        self.call(ids, positions, PassCache(again, pieces))


def _by_chunk(current: PrefillPass, index: int) -> list[list[Replay]]:
    """Kinds of replay that rounds wait for, those of one chunk length together: they share a reading."""
    kinds = dict.fromkeys(round_.replay for round_ in current.waiting(index) if round_.replay is not None)
    found: dict[int, list[Replay]] = defaultdict(list)
    for kind in kinds:
        found[kind.chunk].append(kind)
    return list(found.values())


def _joined(
    asked: list[CalibrationTargets | None], more: list[CalibrationTargets | None]
) -> list[CalibrationTargets | None]:
    pairs = zip(asked, more, strict=True)
    return [None if one is None or other is None else one.joined(other) for one, other in pairs]
