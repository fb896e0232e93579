"""Output processing of one request: sample, detokenize, cut at stop strings, accept drafts, roll back.

A sampled token enters the KV cache when the next step runs it. Tokens whose text may still become part of a stop string
are run but not committed; when the stop string completes, they are rolled back. A token that holds both the end of the
text and the start of the stop string is rolled back too.

    | run and committed | run, may begin a stop string | sampled last | drafted |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from kvfold.compression.observe import ObserverSnapshot
from kvfold.engine.detokenizer import StopMatcher, detokenizer_of
from kvfold.engine.sampling import Sampler, Sampling, checked
from kvfold.engine.speculate import Drafter
from kvfold.engine.verify import Verified
from kvfold.errors import InputError
from kvfold.pages.sequence import SequenceCache

StopReason = Literal["length", "eos", "stop"]


@dataclass
class Request:
    """A generation request: the sequence and logits it starts from, its limits, its output and its times."""

    sequence: SequenceCache
    logits_V: Tensor
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    drafter: Drafter | None = None  # over the tokens before the request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: StopReason | None = None
    decode_s: float = 0.0
    setup_s: float = 0.0
    num_steps: int = 0  # tokens that entered the KV cache
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise InputError("stop is a list of non-empty strings")

    @property
    def decode_ms(self) -> float:
        """Mean inter-token latency."""
        return 1e3 * self.decode_s / max(self.num_steps, 1)

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean tokens per decode pass: 1 without drafts, one more than the accepted ones with them."""
        return 1 + self.num_accepted / self.num_passes if self.num_passes else None


class StepTime(NamedTuple):
    """Seconds of a pass, and how many of them went into CUDA graph capture and compilation."""

    pass_s: float
    setup_s: float


class _Checkpoint(NamedTuple):
    """The state that a token was sampled from, for rollback."""

    logits_V: Tensor
    observed: ObserverSnapshot


class OutputProcessor:
    """Takes the logits of each step and samples the tokens that the next step runs."""

    def __init__(self, request: Request, tokenizer: Any, eos: frozenset[int]) -> None:
        self.request = request
        self.eos = eos
        self.sampler = Sampler(request.sampling)
        self.detokenizer = detokenizer_of(tokenizer)
        self._stops = [StopMatcher(stop) for stop in request.stop]
        self._checkpoints: dict[int, _Checkpoint] = {}  # by token index, from the last committed one
        self._picks: Iterator[int] = self.sampler.picks(request.logits_V.unsqueeze(0))
        self._next: int | None = None  # the next token, where it is known and nothing can be rolled back
        self._draft: list[int] = []  # what the last pass ran behind the sampled token
        self._verified: Verified | None = None
        self._is_plain = request.drafter is None and not request.stop
        # Whether the next token is always the argmax and none is rolled back, as asynchronous decode requires.
        self.is_greedy = self._is_plain and request.sampling.temperature == 0

    def sample(self) -> str:
        """Sample a token, and further ones as long as they equal the draft; returns text that is final now."""
        if self._next is not None:
            return self._take(self._next)
        piece, num_accepted = self._sample_one(), 0
        for token in self._draft:
            if self.request.reason is not None or token != self.request.token_ids[-1]:
                break
            num_accepted += 1
            self._keep()
            piece += self._sample_one()
        self._end_draft(num_accepted)
        return piece

    def cut(self) -> None:
        """The token sampled last is the last one."""
        searched = len(self.detokenizer.text)
        self.request.reason = "length"
        self.detokenizer.finish()
        self._check_stops(searched)

    def _take(self, token: int) -> str:
        """As `_sample_one`, where every token that has run is committed."""
        request, detokenizer = self.request, self.detokenizer
        self._next = None
        request.token_ids.append(checked(token))
        if token in self.eos:
            request.reason = "eos"
        else:
            detokenizer.add(token)
            if len(request.token_ids) >= request.max_new_tokens:
                request.reason = "length"
        if request.reason is not None:
            detokenizer.finish()
        before, request.text = len(request.text), detokenizer.text
        return request.text[before:]

    def _end_draft(self, num_accepted: int) -> None:
        if self._verified is not None:
            self._verified.observe()
        if self._draft and self.request.drafter is not None:
            self.request.num_accepted += num_accepted
            self.request.drafter.update(len(self._draft), num_accepted)
        self._verified, self._draft = None, []

    def _sample_one(self) -> str:
        """The next token; returns text that can no longer become part of a stop string."""
        request, searched = self.request, len(self.detokenizer.text)
        if request.stop:
            if self._verified is not None:
                self._verified.observe()
            observed = ObserverSnapshot([request.sequence])
            self._checkpoints[len(request.token_ids)] = _Checkpoint(request.logits_V, observed)
        token = next(self._picks)
        request.token_ids.append(token)
        if request.drafter is not None:
            request.drafter.add(token)
        if token in self.eos:
            request.reason = "eos"
        else:
            self.detokenizer.add(token)
            request.reason = "length" if len(request.token_ids) >= request.max_new_tokens else None
        if request.reason is not None:
            self.detokenizer.finish()
        return self._check_stops(searched)

    def _check_stops(self, searched: int) -> str:
        """Match stop strings in the text from `searched` on; returns the new final text."""
        request, text = self.request, self.detokenizer.text
        ends = [(stop, stop.add(text[searched:])) for stop in self._stops]
        found = [searched + end - len(stop.stop) for stop, end in ends if end is not None]
        final = min(found) if found else len(text) - (0 if request.reason else self._withheld)
        if found:
            request.reason = "stop"
            self._roll_back(final)
        elif request.reason:
            self._commit(len(request.token_ids))
        before = len(request.text)
        request.text = text[:final]
        return request.text[before:]

    @property
    def _withheld(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return max((stop.matched for stop in self._stops), default=0)

    def draft(self, most: int) -> list[int]:
        """Draft tokens behind the last token, at most `most` with it: no more than may still be sampled, nor past the
        end of the open block."""
        request = self.request
        if request.drafter is None:
            return []
        return request.drafter.draft(min(most, self.num_left, request.sequence.open.next_room) - 1)

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.max_new_tokens - len(self.request.token_ids)

    def process(self, logits_V: Tensor, token: int | None, time: StepTime) -> None:
        """Take the logits after the last token, and the token that was chosen by them (`next_tokens`), if one was."""
        if self._is_plain and token is not None:
            request = self.request
            self._next, request.logits_V = token, logits_V
            request.num_steps += 1
            request.num_passes += 1
            request.decode_s += time.pass_s - time.setup_s
            request.setup_s += time.setup_s
            return
        self._picks = self.sampler.picks(logits_V.unsqueeze(0)) if token is None else map(checked, [token])
        self._count(time)
        self._appended(logits_V)

    def process_verified(self, draft: list[int], verified: Verified, greedy: list[int], time: StepTime) -> None:
        """Take the logits after the last token and a draft behind it; `greedy`: the argmax of each row."""
        self._picks = self.sampler.picks(verified.logits_TV, greedy)
        self._draft, self._verified = draft, verified
        self._count(time)
        self.request.num_drafted += len(draft)
        self._keep()

    def _count(self, time: StepTime) -> None:
        self.request.num_passes += 1
        self.request.decode_s += time.pass_s - time.setup_s
        self.request.setup_s += time.setup_s

    def _keep(self) -> None:
        """Append the last token, which the verified pass has run."""
        assert self._verified is not None
        self._appended(self._verified.keep(commit=not self.request.stop))

    def _appended(self, logits_V: Tensor) -> None:
        """The last token is in the KV cache now."""
        self.request.logits_V = logits_V
        self.request.num_steps += 1
        self._commit(self.detokenizer.tokens_within(len(self.detokenizer.text) - self._withheld))

    @property
    def _num_committed(self) -> int:
        """Tokens of this request that cannot be rolled back any more."""
        return self.request.num_steps - (self.request.sequence.open.fill - self.request.sequence.open.committed)

    def _commit(self, num_tokens: int) -> None:
        """Commit the first `num_tokens` tokens, as far as they have run."""
        self.request.sequence.open.commit(max(0, num_tokens - self._num_committed))
        self._checkpoints = {at: point for at, point in self._checkpoints.items() if at >= self._num_committed}

    def _roll_back(self, num_chars: int) -> None:
        """Keep only the tokens of the first `num_chars` characters, and those committed already."""
        request = self.request
        kept = max(self.detokenizer.tokens_within(num_chars), self._num_committed)
        self._commit(kept)
        request.sequence.open.rollback()
        request.logits_V = self._checkpoints[kept].logits_V
        self._checkpoints[kept].observed.restore()
        request.token_ids = request.token_ids[:kept]
