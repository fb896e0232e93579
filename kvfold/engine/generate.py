"""The decode loop over a batch of sequences: sample, stop, step.

A sampled token enters the cache when the next step runs it. Tokens that may still turn out to belong to a stop string
are run but not committed; when the stop string completes, they roll back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from kvfold.engine.runner import Runner
from kvfold.engine.sample import Sampler, Sampling
from kvfold.errors import InputError
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

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise InputError("stop is a list of non-empty strings")
        self.sampler = Sampler(self.sampling)
        self._run = 0  # tokens that went through the model

    @property
    def pending(self) -> list[int]:
        """Sampled tokens that are not in the cache yet."""
        return self.token_ids[self._run :]


def generate(runner: Runner, requests: Sequence[Request], tokenizer: Any) -> Iterator[tuple[Request, str]]:
    """Run until every request has ended; yields (request, piece of text) as text becomes final."""
    live = list(requests)
    texts = {id(request): _Text(tokenizer, request) for request in requests}
    while live:
        for request in live:
            token = request.sampler.pick(request.logits_V)
            request.token_ids.append(token)
            piece = texts[id(request)].add(token, runner.spec.eos_token_ids)
            if piece:
                yield request, piece
        ended = [request for request in live if request.reason is not None]
        for request in ended:
            texts[id(request)].roll_back()
        live = [request for request in live if request.reason is None]
        if live:
            began = time.perf_counter()
            logits = runner.decode(
                [request.sequence for request in live],
                [request.token_ids[-1] for request in live],
                commit=[texts[id(request)].is_safe for request in live],
            )
            step_s = time.perf_counter() - began
            for request, row in zip(live, logits, strict=True):
                request.logits_V = row
                request._run += 1
                request.decode_s += step_s


class _Text:
    """Text of one request as it grows: whole characters only, cut at a stop string."""

    def __init__(self, tokenizer: Any, request: Request) -> None:
        self.tokenizer = tokenizer
        self.request = request
        self.held = 0  # characters at the end that may begin a stop string

    @property
    def is_safe(self) -> bool:
        """No stop string can still reach back over what was generated."""
        return self.held == 0

    def add(self, token: int, eos: frozenset[int]) -> str:
        """Account for a sampled token; returns text that is final now."""
        request = self.request
        if token in eos:
            request.reason = "eos"
        elif len(request.token_ids) >= request.max_new_tokens:
            request.reason = "length"
        before = len(request.text)
        visible = request.token_ids[:-1] if token in eos else request.token_ids
        text = str(self.tokenizer.decode(visible, skip_special_tokens=True))
        cut = min((at for at in (text.find(stop) for stop in request.stop) if at >= 0), default=None)
        if cut is not None:
            request.reason = "stop"
            text = text[:cut]
            self.held = 0
        else:
            self.held = _overlap(text, request.stop)
        final = len(text)
        if request.reason is None:
            final -= self.held
            final -= 1 if text.endswith("\ufffd") else 0  # half a character
        request.text = text[: max(final, before)]
        return request.text[before:]

    def roll_back(self) -> None:
        """After a stop string: tokens past the commit line leave the cache and the result."""
        request = self.request
        if request.reason != "stop":
            request.sequence.open.commit(request.sequence.open.fill - request.sequence.open.committed)
            return
        dropped = request.sequence.open.fill - request.sequence.open.committed
        request.sequence.open.rollback()
        request._run -= dropped
        request.token_ids = request.token_ids[: request._run]


def _overlap(text: str, stops: Sequence[str]) -> int:
    """The longest end of the text that begins a stop string."""
    best = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), best, -1):
            if text.endswith(stop[:length]):
                best = length
                break
    return best
