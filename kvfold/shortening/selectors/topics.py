"""`topics`: the loaded model's own words on each topic of a text (after Fei et al., arXiv:2312.09571).

B blocks of consecutive units   K topics   D dimensions
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfold.errors import SizeError
from kvfold.policy.registry import register
from kvfold.shortening.base import Selector, Task, Unit
from kvfold.shortening.clusters import Codes, clusters
from kvfold.shortening.embedders.codes import SCALE, encode_unit
from kvfold.shortening.protected import check_room, kept_spans

Integers = NDArray[np.int64]
Span = tuple[int, int]
_BLOCK = 128  # tokens
_NEAR = 0.3  # how much a block is like its neighbours in the text
_LEAST = 32  # tokens of a summary
_PROMPT = (
    "Summarize the following text in at most {words} words. Keep names, numbers and facts. Write only the summary.\n\n"
    "{text}"
)
_CLOSING = "\"'”’)"
_END = re.compile(rf"[.!?][{_CLOSING}]*+(?=\s)")


class _Topic(NamedTuple):
    """Blocks on one topic, in the order of the text, and how many tokens say it again."""

    blocks: tuple[Span, ...]
    num_tokens: int

    def holds(self, span: Span) -> bool:
        return any(start <= span[0] < end for start, end in self.blocks)


@register(
    "selector",
    "topics",
    paper="arXiv:2312.09571",
    cost="the text read, the target decoded",
    published="differs: k-means, the loaded model as summariser, verbatim spans",
)
@dataclass(frozen=True)
class Topics(Selector):
    """Question-free and not extractive: the loaded model summarises each topic, so facts may be lost or invented.

    Blocks of 128 tokens are clustered by their vectors, to which those of their neighbours are added; there are as many
    topics as make `topic` tokens each. The target is shared out by tokens times (1 - mean cosine within the topic), and
    the summaries stand in the order of the mean position of their topics. What `keep` names and the summary lacks
    follows it verbatim.

    Against the paper: k-means in place of its graph, and no summariser of its own.
    """

    topic: int = 512
    is_extractive: ClassVar[bool] = False

    @property
    def needs_model(self) -> bool:
        return True

    def validate(self) -> str | None:
        return None if self.topic >= _BLOCK else f"topic is at least {_BLOCK} tokens, not {self.topic}"

    def rewrite(self, task: Task) -> str:
        kept = kept_spans(task)
        needed = sum(task.tokens.count(*span) + 1 for span in kept)  # each on a line of its own
        check_room(task, needed)
        body = _between_ends(task)
        parts = self._parts(task, body, task.target - needed) if body else []
        low, high = (body[0].start, body[-1].end) if body else (len(task.text), len(task.text))
        written = [task.text[:low].strip()]
        for number, topic in enumerate(parts, 1):
            text = _summary(task, topic)
            mine = dict.fromkeys(task.text[slice(*span)].strip() for span in kept if topic.holds(span))
            written.append("\n".join([text, *(one for one in mine if one not in text)]).strip())
            if task.progress is not None:
                task.progress(number, len(parts))
        return "\n\n".join(filter(None, [*written, task.text[high:].strip()]))

    def _parts(self, task: Task, body: tuple[Unit, ...], room: int) -> list[_Topic]:
        """Topics, and the parts of those that are twice as long as they should be, with their shares of the room."""
        if room < _LEAST:
            raise SizeError(
                f"a summary takes {_LEAST} tokens at least, and {max(room, 0)} of {task.target} are left beside what "
                "must stay; shorten less, or keep less, such as keep=none"
            )
        blocks = _blocks(task, body)
        cost_B = np.array([task.tokens.count(*block) for block in blocks], dtype=np.int64)
        most = min(round(int(cost_B.sum()) / self.topic), room // _LEAST, len(blocks))
        label_B, codes_BD = _labels(task, blocks, max(1, most))
        groups = [
            part for k in range(label_B.max() + 1) for part in _cut(np.flatnonzero(label_B == k), cost_B, self.topic)
        ]
        weight = np.array([cost_B[part].sum() * (1 - _redundancy(codes_BD[part])) for part in groups])
        share = np.maximum(1, np.floor((room - 2 * len(groups)) * weight / weight.sum())).astype(int)
        order = np.argsort([part.mean() for part in groups], kind="stable")
        return [_Topic(tuple(blocks[at] for at in groups[k]), int(share[k])) for k in order]


def _between_ends(task: Task) -> tuple[Unit, ...]:
    """Parts without those at the ends of a message that stay word for word."""
    if task.ends_n is None or not task.ends_n.any():
        return task.parts
    inner = np.flatnonzero(~task.ends_n)
    return task.parts[inner[0] : inner[-1] + 1] if len(inner) else ()


def _blocks(task: Task, parts: tuple[Unit, ...]) -> list[Span]:
    """Consecutive parts of at most 128 tokens together; a longer part is a block of its own."""
    bounds = [*(part.start for part in parts), parts[-1].end]
    starts, count = [], _BLOCK
    for start, end in pairwise(bounds):
        tokens = task.tokens.count(start, end)
        if count + tokens > _BLOCK:
            starts.append(start)
            count = 0
        count += tokens
    return list(pairwise([*starts, bounds[-1]]))


def _labels(task: Task, blocks: list[Span], count: int) -> tuple[Integers, Codes]:
    """The topic of each block, and the vectors of the blocks."""
    codes_BD = task.embedder.codes([task.text[slice(*block)] for block in blocks])
    near_BD = codes_BD.astype(np.float64)
    near_BD[1:] += _NEAR * codes_BD[:-1]
    near_BD[:-1] += _NEAR * codes_BD[1:]
    label_B, _ = clusters(encode_unit(near_BD), count)
    return label_B, codes_BD


def _cut(numbers: Integers, cost_B: Integers, topic: int) -> list[Integers]:
    """Blocks of one topic in runs of nearly equal cost, none of which is much above twice the usual."""
    if not len(numbers):
        return []
    total = np.cumsum(cost_B[numbers])
    count = -(-int(total[-1]) // (2 * topic))
    return [
        part for part in np.split(numbers, np.searchsorted(total, total[-1] * np.arange(1, count) / count)) if len(part)
    ]


def _redundancy(codes_nD: Codes) -> float:
    """Mean cosine between two blocks, from 0 to 0.9."""
    n = len(codes_nD)
    if n < 2:
        return 0.0
    total_D = codes_nD.sum(0, dtype=np.float64)
    own = float(np.square(codes_nD, dtype=np.float64).sum())
    return min(0.9, max(0.0, (float(total_D @ total_D) - own) / (n * (n - 1) * SCALE**2)))


def _summary(task: Task, topic: _Topic) -> str:
    """The model's words on a topic; of a block beyond its context, on each window."""
    assert task.model is not None
    text = "".join(task.text[slice(*block)] for block in topic.blocks).strip()
    windows = task.model.windows(text)
    limit = max(1, topic.num_tokens // max(1, len(windows)))
    prompts = (_PROMPT.format(words=limit * 3 // 4, text=text[slice(*window)]) for window in windows)
    return " ".join(_whole_sentences(task.model.complete(prompt, limit)) for prompt in prompts)


def _whole_sentences(text: str) -> str:
    """Without a last sentence that was cut off, if there is one before it."""
    ends = [match.end() for match in _END.finditer(text)]
    return text if not ends or text.rstrip().endswith((*".!?", *_CLOSING)) else text[: ends[-1]]
