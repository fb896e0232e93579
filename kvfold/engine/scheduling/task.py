"""An admitted job: owns a sequence, prefills its prompt chunk by chunk, decodes its reply, may be preempted.

    waiting -> prefilling -> decoding -> ended
                               |  ^
                       preempt |  | resume
                               v  |
                        KV cache on the host

A policy that compresses nothing prefills in chunks that end at absolute multiples of the runner's chunk length,
whatever its cuts are; a compressing one prefills each stretch between two cuts in one pass. Either pauses inside,
between layers, when others are to run; the result is bitwise that of an uninterrupted pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kvfold.engine.output_processor import OutputProcessor, Request
from kvfold.engine.resumable import Resumable
from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.jobs import Ended, EndReason, Job, PrefillDone, TextDelta
from kvfold.engine.scheduling.shared_prefix import Running, start_of
from kvfold.errors import SizeError
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry.format import Fields
from kvfold.store.entry.snapshot import restore_snapshot, snapshot_blocks

_log = logging.getLogger("kvfold.engine")


class Task:
    """Made when its job is admitted; owns the sequence from then on. `in_chunks`: prefill chunk by chunk.
    `prompt_bytes`: the most that its prompt takes. `running`: tasks whose prefixes it may share."""

    def __init__(
        self,
        job: Job,
        runner: Runner,
        tokenizer: Any,
        *,
        in_chunks: bool,
        prompt_bytes: int = 0,
        running: Iterable[Running] = (),
    ) -> None:
        begin = start_of(job, running)
        self.job = job
        self.prompt_bytes = prompt_bytes
        self.tenant = job.tenant
        self.sequence: SequenceCache = begin.sequence
        self.num_reused = begin.num_read
        self.blocked_at: int | None = None  # free bytes of the arena when a prefill last ran out of pages
        self.preempted_len = 0  # tokens of the copy on the host
        self.runs_alone = False  # since a pass that it shared has raised
        cuts = [len(job.tokens)] if begin.cuts is None else begin.cuts
        self._cuts = sorted(cut for cut in cuts if begin.num_read < cut <= len(job.tokens))
        self._runner = runner
        self._tokenizer = tokenizer
        self._in_chunks = in_chunks
        self._pass: Resumable[Tensor] | None = None  # the prefill of the next chunk, once it has begun
        self._processor: OutputProcessor | None = None  # None until the prompt is read
        self._host_copy: dict[str, Fields] | None = None
        self._num_told = 0  # characters of the text that the listener has been told of

    @property
    def is_prefilling(self) -> bool:
        return self._processor is None

    @property
    def output(self) -> OutputProcessor:
        """Of a task that decodes."""
        assert self._processor is not None
        return self._processor

    @property
    def is_sampled(self) -> bool:
        """Whether a token has been sampled that has not run."""
        request = self.output.request
        return len(request.token_ids) > request.num_steps

    # Prefill

    @property
    def next_len(self) -> int:
        """Tokens of the chunk that is prefilled next."""
        return self._chunk_end - self.sequence.committed_len

    def prefill(self, is_due: Callable[[], bool]) -> None:
        """Run the next chunk of the prompt, or its layers until a pause is due; after the last chunk decoding begins.
        OutOfPages: the chunk starts anew."""
        num_tokens = self.next_len
        if self._pass is None:
            self._pass = Resumable(partial(self._prefill, self.next_tokens(), self.compresses_next), is_due)
        current, is_done = self._pass, False
        try:
            is_done = current.resume()
        except BaseException:
            self._pass = None
            raise
        if is_done:
            self._pass = None
            self.prefilled(num_tokens, current.result[0])

    def can_join(self, most: int) -> bool:
        """Whether its next chunk may run in one pass with those of others: it has not begun and is short."""
        return not self.runs_alone and self._pass is None and self.next_len <= most

    @property
    def compresses_next(self) -> bool:
        """Whether the policy compresses at the end of the next chunk; one that compresses nothing does at every end."""
        return self._in_chunks or self._stretch_end in self._cuts

    def next_tokens(self) -> Sequence[int]:
        """Of the next chunk, whose pass begins."""
        self.sequence.pinned = self._settled
        return self.job.tokens[self.sequence.committed_len : self._chunk_end]

    def prefilled(self, num_tokens: int, logits_V: Tensor) -> None:
        """The next chunk, of so many tokens, has run; after the last one decoding begins."""
        end = self.sequence.committed_len
        for cut in (cut for cut in self._cuts if end - num_tokens < cut < end):
            self.job.source.reached(self.sequence, cut)
        if end in self._cuts or end == len(self.job.tokens):
            self.job.source.reached(self.sequence, end)
        if end == len(self.job.tokens):
            self._begin_decode(logits_V)

    @property
    def _settled(self) -> list[tuple[int, int]]:
        """Positions that earlier compressions kept, pinned where the size is relative to the prompt: a score that
        judges by the newest text would evict them. Under an absolute size everything competes each time."""
        size, end = self.sequence.policy.prefill.size, self.sequence.last_compressed_len
        return [(0, end)] if size is not None and not size.is_absolute and end else []

    def _prefill(self, tokens: Sequence[int], compress: bool) -> Tensor:
        """A prompt too short for the policy's size stays uncompressed: a server does not choose prompt lengths."""
        try:
            return self._runner.prefill([self.sequence], [tokens], compress=compress)
        except SizeError:
            return self._runner.prefill([self.sequence], [tokens], compress=False)

    @property
    def _stretch_end(self) -> int:
        """Where the prompt is compressed next, or ends."""
        return next((cut for cut in self._cuts if cut > self.sequence.committed_len), len(self.job.tokens))

    @property
    def _chunk_end(self) -> int:
        chunk, start = self._runner.chunk_len, self.sequence.committed_len
        return min(len(self.job.tokens), start - start % chunk + chunk) if self._in_chunks else self._stretch_end

    def _begin_decode(self, logits_V: Tensor) -> None:
        job, self.sequence.pinned = self.job, []
        job.source.began()
        job.listener(PrefillDone(self.num_reused))
        request = Request(self.sequence, logits_V, max(job.max_new_tokens, 1), job.sampling, job.stop)
        eos = frozenset[int]() if job.ignores_eos else self._runner.spec.eos_token_ids
        self._processor = OutputProcessor(request, self._tokenizer, eos)

    # Decode

    def sample(self) -> bool:
        """Sample the next token; False when the job has ended."""
        if self.job.max_new_tokens == 0:
            self.end("read")
            return False
        output = self.output
        output.sample()
        reason = output.request.reason
        if reason is None:
            return True
        self._tell_rest()
        self.end(reason)
        return False

    def cut(self) -> None:
        """End where it is, as at its length: there is no memory for another token."""
        self.output.cut()
        self._tell_rest()
        self.end(self.output.request.reason or "length")

    def tell(self) -> None:
        """Send the text that has come since the last time, if the job is streamed."""
        if self._processor is not None and self.job.is_streamed:
            self._tell_rest()

    def _tell_rest(self) -> None:
        text, told = self.output.request.text, self._num_told
        if len(text) > told:
            self._num_told = len(text)
            self.job.listener(TextDelta(text[told:]))

    @property
    def _stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        if self._processor is None or self._processor.request.reason != "stop":
            return None
        rest = self._processor.detokenizer.text[len(self._processor.request.text) :]
        return next((stop for stop in self.job.stop if rest.startswith(stop)), None)

    def can_retry(self, logical_len: int) -> bool:
        """Whether a step that raised has left the KV cache at this length, so that it can run again. A block that it
        sealed stays sealed."""
        return self.sequence.logical_len == logical_len and not self.sequence.is_torn

    # Preemption

    @property
    def can_preempt(self) -> bool:
        """Whether all tokens that have run are committed: a copy holds only those."""
        return self._processor is not None and self.sequence.open.fill == self.sequence.open.committed

    def preempt(self) -> None:
        """Swap the KV cache out to the host and free its pages."""
        self._host_copy = snapshot_blocks(self.sequence)
        self.preempted_len = self.sequence.committed_len
        self.release()

    def resume(self) -> None:
        """Swap the KV cache in, bit for bit; OutOfPages leaves the copy on the host."""
        assert self._host_copy is not None
        sequence = self._runner.new_sequence(self.sequence.policy, self.sequence.config)
        try:
            restore_snapshot(sequence, self.preempted_len, self._host_copy.items())
        except BaseException:
            sequence.release()
            raise
        self.sequence = self.output.request.sequence = sequence
        self._host_copy = None

    def end(self, reason: EndReason, error: Exception | None = None) -> None:
        """Release the pages and tell the listener, of text that it has not been told of too; raises nothing."""
        self.release()
        self._host_copy = None
        try:
            self.tell()
        except Exception:
            _log.exception("a listener raised when it was told of the end of a text")
        num_tokens = 0 if self._processor is None or reason == "read" else len(self._processor.request.token_ids)
        self.job.end(Ended(reason, num_tokens, self._stop, error))

    def release(self) -> None:
        """Free the pages, also those of a paused pass. If the first attempt raises, a second one frees the rest."""
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
