"""The decode loop over a batch of sequences: sample, stop, step.

A sampled token enters the cache when the next step runs it. Tokens whose text may still turn out to belong to a stop
string are run but not committed; when the stop string completes, they roll back, and the sequence is where it was
before them. A token that holds both the end of the text and the start of the stop string goes with the stop string.

    | run and committed | run, may begin a stop string | sampled last |
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from kvfold.engine.runner import Runner
from kvfold.engine.sample import Sampler, Sampling
from kvfold.engine.text import TextStream
from kvfold.errors import InputError
from kvfold.models.observed import Undo
from kvfold.pages.sequence import SequenceCache

StopReason = Literal["length", "eos", "stop"]


@dataclass
class Request:
    """One sequence's generation: what it starts from, when it ends, what came out."""

    sequence: SequenceCache
    logits_V: Tensor
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: StopReason | None = None
    decode_s: float = 0.0
    num_steps: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise InputError("stop is a list of non-empty strings")

    @property
    def decode_ms(self) -> float:
        """Mean time of a step."""
        return 1e3 * self.decode_s / max(self.num_steps, 1)


def generate(runner: Runner, requests: Sequence[Request], tokenizer: Any) -> Iterator[tuple[Request, str]]:
    """Run until every request has ended; yields (request, piece of text) as text becomes final."""
    writers = [_Writer(request, tokenizer, runner.spec.eos_token_ids) for request in requests]
    while live := [writer for writer in writers if writer.request.reason is None]:
        for writer in live:
            piece = writer.sample()
            if piece:
                yield writer.request, piece
        _step(runner, [writer for writer in live if writer.request.reason is None])


def _step(runner: Runner, writers: Sequence[_Writer]) -> None:
    if not writers:
        return
    began = time.perf_counter()
    logits_BV = runner.decode(
        [writer.request.sequence for writer in writers],
        [writer.request.token_ids[-1] for writer in writers],
        commit=[not writer.request.stop for writer in writers],
    )
    step_s = time.perf_counter() - began
    for writer, logits_V in zip(writers, logits_BV, strict=True):
        writer.ran(logits_V, step_s)


class _Mark(NamedTuple):
    """What a token was sampled from."""

    logits_V: Tensor
    undo: Undo


class _Writer:
    """One request as it grows: samples, makes text of tokens, cuts it at a stop string."""

    def __init__(self, request: Request, tokenizer: Any, eos: frozenset[int]) -> None:
        self.request = request
        self.eos = eos
        self.sampler = Sampler(request.sampling)
        self.stream = TextStream(tokenizer)
        self.marks: dict[int, _Mark] = {}  # by token, back to the commit line

    def sample(self) -> str:
        """The next token; returns text that is final now."""
        request, searched = self.request, len(self.stream.text)
        if request.stop:
            self.marks[len(request.token_ids)] = _Mark(request.logits_V, Undo([request.sequence]))
        token = self.sampler.pick(request.logits_V)
        request.token_ids.append(token)
        if token in self.eos:
            request.reason = "eos"
        else:
            self.stream.add(token)
            request.reason = "length" if len(request.token_ids) >= request.max_new_tokens else None
        if request.reason is not None:
            self.stream.finish()
        return self._settle(searched)

    def _settle(self, searched: int) -> str:
        """Look for stop strings; what cannot become part of one is final."""
        request, text = self.request, self.stream.text
        found = [at for at in (text.find(stop, max(0, searched - len(stop) + 1)) for stop in request.stop) if at >= 0]
        final = min(found) if found else len(text) - (0 if request.reason else self._held)
        if found:
            request.reason = "stop"
            self._roll_back(final)
        elif request.reason:
            self._commit(len(request.token_ids))
        before = len(request.text)
        request.text = text[:final]
        return request.text[before:]

    @property
    def _held(self) -> int:
        """Characters at the end that may begin a stop string."""
        return max((_overlap(self.stream.text, stop) for stop in self.request.stop), default=0)

    def ran(self, logits_V: Tensor, step_s: float) -> None:
        """The last token went through the model."""
        self.request.logits_V = logits_V
        self.request.num_steps += 1
        self.request.decode_s += step_s
        self._commit(self.stream.tokens_within(len(self.stream.text) - self._held))

    @property
    def _num_committed(self) -> int:
        """Tokens of this request behind the commit line; each step ran one."""
        return self.request.num_steps - (self.request.sequence.open.fill - self.request.sequence.open.committed)

    def _commit(self, num_tokens: int) -> None:
        """Move the commit line behind the first `num_tokens` tokens, as far as they have run."""
        self.request.sequence.open.commit(max(0, num_tokens - self._num_committed))
        self.marks = {at: mark for at, mark in self.marks.items() if at >= self._num_committed}

    def _roll_back(self, num_chars: int) -> None:
        """Only the tokens of the first `num_chars` characters stay; those committed already do in any case."""
        request = self.request
        kept = max(self.stream.tokens_within(num_chars), self._num_committed)
        self._commit(kept)
        request.sequence.open.rollback()
        request.logits_V = self.marks[kept].logits_V
        self.marks[kept].undo.restore()
        request.token_ids = request.token_ids[:kept]


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text that begins the stop string."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
