"""Self-study: the model answers generic questions about a prompt, over its uncompressed KV cache.

All questions are answered in one batch, greedily. Their queries resemble a user's, while those of a replay only predict
the next word of the prompt (engine/replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvfold.compression.full_prompt import FullPrompt
from kvfold.evicted.base import CalibrationTargets
from kvfold.models.pass_cache import Call, PassCache, Piece
from kvfold.models.self_study_questions import question_ids
from kvfold.models.spec import output_head
from kvfold.passes.probe import SelfStudyPass


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
    ids: list[int] = []
    positions: list[int] = []
    pieces: list[Piece] = []
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
