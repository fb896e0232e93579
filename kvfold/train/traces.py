"""Training examples of the learned score: features of slots, and the teacher's scores from a replay.

H KV heads   N examples (slots)   F features
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.compression.view import build_view
from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.evicted.base import CalibrationTargets
from kvfold.passes.prefill import PrefillPass
from kvfold.plurals import counted
from kvfold.policy.policy import Policy
from kvfold.score.base import Replay, Scorer, View
from kvfold.score.predictor import features

TEACHER = "kvzip"
MIN_LEN = 135  # tokens: half of them hold 4 sinks, 32 recent slots and an open block of 32, which have to fit


class Examples(NamedTuple):
    """Of one layer."""

    x_HNF: Tensor  # fp16
    y_HN: Tensor  # fp32: the teacher's score, from 0 to 1


class _TracedPass(PrefillPass):
    """A pass that compresses nothing and keeps what a replay observed."""

    examples: dict[int, Examples]

    def select_after_replay(
        self, index: int, replay: Replay, maxima: Sequence[Tensor | None], targets: Sequence[CalibrationTargets | None]
    ) -> None:
        sequence, prompt = self.sequences[index], self.full_prompts[index]
        self.examples = {}
        for layer in sequence.spec.compressible_layers:
            new = prompt.new_slots(layer, torch.float32, maxima[layer])
            teacher = sequence.policy.prefill.score
            self.examples[layer] = _examples(build_view(sequence, layer, new, teacher.needs), teacher)


def teacher_policy(teacher: str) -> Policy:
    """A policy with this score; InputError if the score does not replay the prompt."""
    policy = Policy.parse(f"{teacher} + 2x")
    if policy.prefill.score.needs.replay is None:
        raise InputError(f'"{teacher}" does not read a text twice, so it needs no prediction; use kvzip or kvzip_plus')
    return policy


def teacher_weighs(teacher: str) -> bool:
    """Whether queries of its replay count by the surprise of their tokens."""
    replay = teacher_policy(teacher).prefill.score.needs.replay
    return replay is not None and replay.surprise > 0


def trace(runner: Runner, ids: Sequence[int], teacher: str, surprise_N: Tensor | None = None) -> dict[int, Examples]:
    """Prefill and replay a text; by layer, the features and teacher scores of all its tokens but the sinks.

    `surprise_N`: of its tokens, for a teacher that weighs queries by them; by default the model's own.
    """
    if len(ids) < MIN_LEN:
        raise InputError(f"a text of {counted(len(ids), 'token')} teaches nothing; give texts of at least {MIN_LEN}")
    given = None if surprise_N is None else [surprise_N.to(runner.arena.device)]
    sequence = runner.new_sequence(teacher_policy(teacher))
    try:
        with torch.inference_mode():
            current = _TracedPass.begin([sequence], [len(ids)])
            try:
                runner.run_pass(current, [ids], hidden=True, surprises=given)
            finally:
                current.release()
        return current.examples
    finally:
        sequence.release()


def _examples(view: View, teacher: Scorer) -> Examples:
    score_HN = teacher.score(view)
    judged = score_HN[0].isfinite()  # the same slots for every head: nothing is stored yet
    x_HNF = features(view.k_RSD, view.v_RSD, view.position_RS, view.spec.rope)[:, judged]
    return Examples(x_HNF.half(), score_HN[:, judged].clamp(max=1.0))  # those of kvzip_plus can exceed it


def joined(texts: Sequence[dict[int, Examples]], layer: int) -> Examples:
    """The examples of one layer from several texts."""
    found = [text[layer] for text in texts]
    return Examples(torch.cat([each.x_HNF for each in found], 1), torch.cat([each.y_HN for each in found], 1))
