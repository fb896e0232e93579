"""`keyphrases`: what a text is about in a few sentences, for 5x to 20x: lead sentences, and sentences of keyphrases.

N units
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvfold.policy.registry import register
from kvfold.shortening.base import Bools, Floats, Selector, Task
from kvfold.shortening.chunkers.grouping import cut_evenly, is_alone, paragraphs
from kvfold.shortening.keyphrases import phrase_weights

_LEADS = 0.3  # of the target, at most about


@register("selector", "keyphrases", cost="none", published="differs: YAKE weighs sentences of the text")
@dataclass(frozen=True)
class Keyphrases(Selector):
    """Question-free: lead sentences all over the text, and sentences that hold its keyphrases (YAKE).

    About a third of the target is for leads: the text is parted into as many groups of paragraphs as that has room for
    sentences, and of each group the first sentence behind a heading stays, or else its first. Other sentences are worth
    the weights of their keyphrases, by the root of their length.
    """

    phrases: int = 100

    avoids_repeats: ClassVar[bool] = True

    def validate(self) -> str | None:
        return None if self.phrases >= 1 else f"phrases is at least 1, not {self.phrases}"

    def worth(self, task: Task) -> Floats:
        worth_N = phrase_weights(task, self.phrases, task.progress)
        return worth_N / max(float(worth_N.max(initial=0.0)), 1e-9) + 2.0 * leads(task)


def leads(task: Task) -> Bools:
    """[N]: one unit of every group of paragraphs."""
    cost_N = task.num_tokens_N
    before = np.concatenate([[0], np.cumsum(cost_N)])
    first = [low for low, _ in paragraphs(task.text, task.units) if not is_alone(task.units[low])]
    found_N = np.zeros(len(task.units), dtype=bool)
    if not first:
        return found_N
    room = int(_LEADS * task.target // max(1.0, float(cost_N[first].mean())))
    at = before[[*first, len(cost_N)]]
    for low, high in cut_evenly(0, len(first), at, max(1, -(-int(at[-1] - at[0]) // max(1, room)))):
        group = first[low:high]
        opens = [unit for unit in group if unit and task.units[unit - 1].kind == "heading"]
        found_N[(opens or group)[0]] = True
    return found_N
