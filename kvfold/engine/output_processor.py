"""A request as it grows: sample, make text of tokens, cut it at a stop string.

A sampled token enters the cache when the next step runs it. Tokens whose text may still turn out to belong to a stop
string are run but not committed; when the stop string completes, they roll back, and the sequence is where it was
before them. A token that holds both the end of the text and the start of the stop string goes with the stop string.

    | run and committed | run, may begin a stop string | sampled last | drafted |
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kvfold.compress.observe import ObserverSnapshot
from kvfold.engine.detokenizer import TextStream
from kvfold.engine.request import Request
from kvfold.engine.sampling import Sampler
from kvfold.engine.stop_strings import StopMatcher
from kvfold.engine.verify import Verified


class Took(NamedTuple):
    """Seconds of a pass, and those among them that went into capturing and compiling it."""

    pass_s: float
    setup_s: float


class _Mark(NamedTuple):
    """What a token was sampled from."""

    logits_V: Tensor
    undo: ObserverSnapshot


class Writer:
    """Told what has run, it says what runs next."""

    def __init__(self, request: Request, tokenizer: Any, eos: frozenset[int]) -> None:
        self.request = request
        self.eos = eos
        self.sampler = Sampler(request.sampling)
        self.stream = TextStream(tokenizer)
        self._stops = [StopMatcher(stop) for stop in request.stop]
        self.marks: dict[int, _Mark] = {}  # by token, back to the commit line
        self._picks = self.sampler.picks(request.logits_V.unsqueeze(0))
        self._draft: list[int] = []  # what the last pass ran behind the sampled token
        self._verified: Verified | None = None

    def write(self) -> str:
        """Sample, and go on while that is what was drafted; returns text that is final now."""
        piece, num_accepted = self._sample(), 0
        for token in self._draft:
            if self.request.reason is not None or token != self.request.token_ids[-1]:
                break
            num_accepted += 1
            self._keep()
            piece += self._sample()
        self._end_draft(num_accepted)
        return piece

    def _end_draft(self, num_accepted: int) -> None:
        if self._verified is not None:
            self._verified.observe()
        if self._draft and self.request.drafter is not None:
            self.request.num_accepted += num_accepted
            self.request.drafter.learn(len(self._draft), num_accepted)
        self._verified, self._draft = None, []

    def _sample(self) -> str:
        """The next token; returns text that is final now."""
        request, searched = self.request, len(self.stream.text)
        if request.stop:
            if self._verified is not None:
                self._verified.observe()
            self.marks[len(request.token_ids)] = _Mark(request.logits_V, ObserverSnapshot([request.sequence]))
        token = next(self._picks)
        request.token_ids.append(token)
        if request.drafter is not None:
            request.drafter.add(token)
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
        ends = [(stop, stop.add(text[searched:])) for stop in self._stops]
        found = [searched + end - len(stop.stop) for stop, end in ends if end is not None]
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
        return max((stop.matched for stop in self._stops), default=0)

    def draft(self, most: int) -> list[int]:
        """What may follow the last token, at most so many tokens with it: no more than may still be sampled, nor past
        the end of the open block."""
        request = self.request
        if request.drafter is None:
            return []
        return request.drafter.draft(min(most, self.num_left, request.sequence.open.next_room) - 1)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always the next, and nothing that has run can turn out to belong to a stop."""
        request = self.request
        return request.sampling.temperature == 0 and request.drafter is None and not request.stop

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.max_new_tokens - len(self.request.token_ids)

    def ran(self, logits_V: Tensor, likeliest: int, took: Took) -> None:
        """The last token went through the model."""
        self._picks = self.sampler.picks(logits_V.unsqueeze(0), [likeliest])
        self._count(took)
        self._entered(logits_V)

    def ran_ahead(self, draft: list[int], verified: Verified, likeliest: list[int], took: Took) -> None:
        """The last token went through the model, and a draft behind it; `likeliest`: what follows each of them."""
        self._picks = self.sampler.picks(verified.logits_TV, likeliest)
        self._draft, self._verified = draft, verified
        self._count(took)
        self.request.num_drafted += len(draft)
        self._keep()

    def _count(self, took: Took) -> None:
        self.request.num_passes += 1
        self.request.decode_s += took.pass_s - took.setup_s
        self.request.setup_s += took.setup_s

    def _keep(self) -> None:
        """The last token is the next one of those that ran."""
        assert self._verified is not None
        self._entered(self._verified.keep(commit=not self.request.stop))

    def _entered(self, logits_V: Tensor) -> None:
        """The last token is in the cache."""
        self.request.logits_V = logits_V
        self.request.num_steps += 1
        self._commit(self.stream.tokens_within(len(self.stream.text) - self._held))

    @property
    def _num_committed(self) -> int:
        """Tokens of this request behind the commit line."""
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
