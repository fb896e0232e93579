"""A job that has a sequence: reads its prompt piece by piece, writes its reply, may be set aside on the host.

    waiting -> reading -> writing -> ended
                             |  ^
                             v  |
                           on the host

A policy that keeps everything as it is reads in pieces that end at absolute multiples of the runner's chunk; one that
compresses reads each stretch in one pass. Either pauses inside, between layers, when others are to run: the result is
bitwise that of one go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kvfold.engine.jobs import Began, Ended, EndReason, Job, Wrote
from kvfold.engine.output_processor import Writer
from kvfold.engine.request import Request
from kvfold.engine.resumable import Resumable
from kvfold.engine.runner import Runner
from kvfold.errors import SizeError
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry.format import Fields
from kvfold.store.entry.snapshot import put_back, take

_log = logging.getLogger("kvfold.engine")


class Task:
    """Made when its job is let in; owns the sequence from then on."""

    def __init__(self, job: Job, runner: Runner, tokenizer: Any, *, in_pieces: bool) -> None:
        begin = job.source.begin()
        self.job = job
        self.tenant = job.tenant
        self.sequence: SequenceCache = begin.sequence
        self.writer: Writer | None = None
        self.num_reused = begin.num_read
        cuts = [len(job.tokens)] if begin.cuts is None else begin.cuts
        self._cuts = [cut for cut in cuts if begin.num_read < cut <= len(job.tokens)]
        self._runner = runner
        self._tokenizer = tokenizer
        self._in_pieces = in_pieces
        self._pass: Resumable[Tensor] | None = None  # that reads the next piece, once it has begun
        self.stuck_at: int | None = None  # bytes that were free when reading found too few
        self._blocks: dict[str, Fields] | None = None
        self.len_aside = 0  # tokens that the copy on the host holds

    @property
    def is_reading(self) -> bool:
        return self.writer is None

    @property
    def running(self) -> Writer:
        """The writer of a task that has read its prompt."""
        assert self.writer is not None
        return self.writer

    @property
    def is_sampled(self) -> bool:
        """Whether a token has been sampled that has not run."""
        return len(self.running.request.token_ids) > self.running.request.num_steps

    # Reading

    @property
    def piece_len(self) -> int:
        """Tokens that are read next."""
        return self._piece_end - self.sequence.committed_len

    def read(self, is_due: Callable[[], bool]) -> None:
        """The next piece of the prompt, or as much of it as is read before a pause is due; after the last one the job
        has begun. OutOfPages: the piece begins anew."""
        if self._pass is None:
            compress, self.sequence.pinned = self._stretch_end in self._cuts, self._settled
            tokens = self.job.tokens[self.sequence.committed_len : self._piece_end]
            self._pass = Resumable(partial(self._prefill, tokens, compress), is_due)
        current, is_done = self._pass, False
        try:
            is_done = current.resume()
        except BaseException:
            self._pass = None
            raise
        if is_done:
            self._pass = None
            self._have_read(current.result)

    def _have_read(self, logits_BV: Tensor) -> None:
        end = self.sequence.committed_len
        if end in self._cuts or end == len(self.job.tokens):
            self.job.source.reached(self.sequence, end)
        if end == len(self.job.tokens):
            self._begin(logits_BV[0])

    @property
    def _settled(self) -> list[tuple[int, int]]:
        """What earlier compressions kept, where the size grows with the prompt: it was chosen once, and a score that
        judges by the text it has just read would let it go. Under a bound everything competes each time."""
        size, end = self.sequence.policy.prefill.size, self.sequence.last_compressed_len
        return [(0, end)] if size is not None and not size.is_absolute and end else []

    def _prefill(self, tokens: Sequence[int], compress: bool) -> Tensor:
        """A prompt too short for the policy's size is kept whole: a server does not choose how long prompts are."""
        try:
            return self._runner.prefill([self.sequence], [tokens], compress=compress)
        except SizeError:
            return self._runner.prefill([self.sequence], [tokens], compress=False)

    @property
    def _stretch_end(self) -> int:
        """Where the prompt is compressed next, or ends."""
        return next((cut for cut in self._cuts if cut > self.sequence.committed_len), len(self.job.tokens))

    @property
    def _piece_end(self) -> int:
        chunk, start = self._runner.chunk_len, self.sequence.committed_len
        return min(self._stretch_end, start - start % chunk + chunk) if self._in_pieces else self._stretch_end

    def _begin(self, logits_V: Tensor) -> None:
        job, self.sequence.pinned = self.job, []
        job.source.began()
        job.listener(Began(self.num_reused))
        request = Request(self.sequence, logits_V, max(job.max_new_tokens, 1), job.sampling, job.stop)
        self.writer = Writer(request, self._tokenizer, self._runner.spec.eos_token_ids)

    # Writing

    def write(self) -> bool:
        """Sample, and tell what was written; False when the job has come to its end."""
        if self.job.max_new_tokens == 0:
            self.end("read")
            return False
        piece, request = self.running.write(), self.running.request
        if piece:
            self.job.listener(Wrote(piece))
        if request.reason is not None:
            self.end(request.reason)
            return False
        return True

    @property
    def _stop(self) -> str | None:
        """The stop string that follows the text, where one ended it."""
        if self.writer is None or self.writer.request.reason != "stop":
            return None
        rest = self.writer.stream.text[len(self.writer.request.text) :]
        return next((stop for stop in self.job.stop if rest.startswith(stop)), None)

    def can_step_again(self, logical_len: int) -> bool:
        """Whether a step that raised has left the cache as it was, at this length: what it sealed on its way, it would
        have sealed again."""
        return self.sequence.logical_len == logical_len and not self.sequence.is_torn

    # Setting aside

    @property
    def can_leave(self) -> bool:
        """Whether everything that has run is committed, which is what a copy holds."""
        return self.writer is not None and self.sequence.open.fill == self.sequence.open.committed

    def leave(self) -> None:
        """Move to the host; the pages are free."""
        self._blocks = take(self.sequence)
        self.len_aside = self.sequence.committed_len
        self.release()

    def come_back(self) -> None:
        """Move to the device; OutOfPages leaves the copy where it is."""
        assert self._blocks is not None
        sequence = self._runner.new_sequence(self.sequence.policy, self.sequence.config)
        try:
            put_back(sequence, self.len_aside, self._blocks.items())
        except BaseException:
            sequence.release()
            raise
        self.sequence = self.running.request.sequence = sequence
        self._blocks = None

    def end(self, reason: EndReason, error: Exception | None = None) -> None:
        """Give the memory back and say so; raises nothing."""
        self.release()
        self._blocks = None
        num_tokens = 0 if self.writer is None or reason == "read" else len(self.writer.request.token_ids)
        self.job.end(Ended(reason, num_tokens, self._stop, error))

    def release(self) -> None:
        """Give the memory back, also of a pass that pauses. A second attempt gives back what the first one, if it
        raised, did not come to."""
        if self._pass is not None:
            self._pass.abandon()
            self._pass = None
        try:
            self.sequence.release()
        except Exception:
            _log.exception("a sequence could not be released; once more")
            try:
                self.sequence.release()
            except Exception:
                _log.exception("pages of the arena may be lost")
