"""`rank`: the units that a question asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfold.policy.registry import register
from kvfold.shortening.base import Floats, Selector, Task
from kvfold.shortening.bm25 import bm25, reciprocal_ranks
from kvfold.shortening.embedders.codes import cosines


@register("selector", "rank", cost="none")
@dataclass(frozen=True)
class Rank(Selector):
    """Question-aware: units that the question's words (BM25) and vector find, joined by reciprocal ranks."""

    needs_question: ClassVar[bool] = True

    def worth(self, task: Task) -> Floats:
        assert task.question is not None
        texts = task.texts()
        by_vector = cosines(task.codes_ND, task.embedder.codes([task.question]))[:, 0]
        return reciprocal_ranks([bm25(texts, task.question), np.maximum(by_vector, 0.0)])
