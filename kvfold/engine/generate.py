"""The decode loop over a batch of requests: sample, match stops, step.

Where all requests are greedy and steps are captured, decoding is asynchronous: step t+1 is launched on device-side
argmax tokens before the host reads step t. The device runs while the host detokenizes. A token that ends its request
has been run for nothing: it is never appended to the KV cache, and its slot is discarded.

    device   | step 1       | step 2       | step 3       |
    host                    | detokenize 1 | detokenize 2 |

With a drafter, a step runs the sampled token and a draft behind it (speculative decoding). Sampling continues through
the logits of that pass while it agrees with the draft; each accepted token enters the KV cache as if it had had a step
of its own.

    B sequences of the step   V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.compression.observe import ObserverNeeds
from kvfold.engine.output_processor import OutputProcessor, Request, StepTime
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import greedy_tokens, next_tokens
from kvfold.models.sentences import needs_sentences
from kvfold.pages.async_copy import sent
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.step import layout_of


class AsyncTokens:
    """The argmax token of each row of a step: on the device at once, on the host after an asynchronous copy."""

    def __init__(self, sequences: Sequence[SequenceCache], logits_BV: Tensor) -> None:
        self._row = {sequence: row for row, sequence in enumerate(sequences)}
        self._host_B = greedy_tokens(logits_BV)
        self._token_B = self._host_B.clamp(min=0)  # NO_TOKEN runs as token 0; the host fails its request
        self._event = None
        if logits_BV.is_cuda:  # copied before the next step is launched, or it would wait for that step
            found_B, self._host_B = self._host_B, torch.empty(len(logits_BV), dtype=torch.int64, pin_memory=True)
            self._host_B.copy_(found_B, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def on_device(self, sequences: Sequence[SequenceCache]) -> Tensor:
        rows = [self._row[sequence] for sequence in sequences]
        if rows == list(range(len(self._row))):
            return self._token_B
        return self._token_B.index_select(0, sent(np.array(rows), self._token_B.device))

    def wait(self, sequences: Sequence[SequenceCache]) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        tokens = self._host_B.tolist()
        return [tokens[self._row[sequence]] for sequence in sequences]


class InFlightStep:
    """A launched step; its tokens enter the KV caches of the sequences that `keep` is called with."""

    def __init__(self, sequences: Sequence[SequenceCache], logits_BV: Tensor) -> None:
        self._logits = dict(zip(sequences, logits_BV.unbind(), strict=True))
        self.tokens = AsyncTokens(sequences, logits_BV)

    def keep(self, sequences: Sequence[SequenceCache]) -> list[Tensor]:
        """Append their tokens to the KV caches; returns the logits after each."""
        for sequence in sequences:
            sequence.open.advance(1)
            sequence.open.commit_all()
        return [self._logits[sequence] for sequence in sequences]


def can_decode_async(runner: Runner, sequence: SequenceCache) -> bool:
    """Whether steps are captured and no scorer observes them: an observation could not be undone."""
    if runner.graphs is None or layout_of(sequence) is None or sequence.open.num_slots < 2:
        return False
    if "is_observed" not in sequence.derived:
        needs = ObserverNeeds.of([sequence.policy], decoding=True)
        sequence.derived["is_observed"] = needs.anything or needs_sentences(sequence.policy)
    return not sequence.derived["is_observed"]


def launch_next(runner: Runner, sequences: Sequence[SequenceCache], token_B: Tensor) -> InFlightStep | None:
    """Launch a step on device-side tokens. None if it runs out of pages or raises, which the next synchronous step will
    raise again, or if it would evict, which must wait until the token is known to be kept."""
    if any(sequence.open.room == 0 and sequence.policy.decode.may_evict for sequence in sequences):
        return None
    try:
        return InFlightStep(sequences, runner.launch(sequences, token_B))
    except Exception:
        return None


Deliver = Callable[[], None]  # hands a step's logits to one request; an exception in it is that request's alone


def generate(runner: Runner, requests: Sequence[Request], tokenizer: Any) -> Iterator[tuple[Request, str]]:
    """Run until every request has ended; yields (request, text delta) as text becomes final."""
    outputs = [OutputProcessor(request, tokenizer, runner.spec.eos_token_ids) for request in requests]
    is_async = all(output.is_greedy and can_decode_async(runner, output.request.sequence) for output in outputs)
    in_flight: InFlightStep | None = None
    while live := [output for output in outputs if output.request.reason is None]:
        for output in live:
            delta = output.sample()
            if delta:
                yield output.request, delta
        running = [output for output in live if output.request.reason is None]
        deliveries: Sequence[Deliver] = ()
        if running and is_async:
            deliveries, in_flight = decode_async(runner, running, in_flight)
        elif running:
            deliveries = decode_step(runner, running)
        for deliver in deliveries:
            deliver()


def decode_async(
    runner: Runner, outputs: Sequence[OutputProcessor], in_flight: InFlightStep | None, *, launches: bool = True
) -> tuple[list[Deliver], InFlightStep | None]:
    """One step, and the next one launched before the host waits for this one's tokens, unless `launches` is False;
    `in_flight`: this step, if it was launched already. Returns a delivery per request, and the step in flight now."""
    began, setup_s = time.perf_counter(), runner.setup_s
    sequences = [output.request.sequence for output in outputs]
    if in_flight is None:
        rows_BV = runner.decode(sequences, [output.request.token_ids[-1] for output in outputs])
        rows, tokens = list(rows_BV), AsyncTokens(sequences, rows_BV)
    else:
        rows, tokens = in_flight.keep(sequences), in_flight.tokens
    more = [output.request.sequence for output in outputs if launches and output.num_left > 1]
    in_flight = launch_next(runner, more, tokens.on_device(more)) if more else None
    greedy = tokens.wait(sequences)
    step_time = StepTime(time.perf_counter() - began, runner.setup_s - setup_s)
    found = zip(outputs, rows, greedy, strict=True)
    return [partial(output.process, logits_V, token, step_time) for output, logits_V, token in found], in_flight


def _chosen(rows_BV: Tensor, outputs: Sequence[OutputProcessor]) -> Sequence[int | None]:
    """The token of each row: the one host-device synchronisation of a step. None if they cannot be drawn together, as
    when memory is out: each is drawn alone then, where an error is its own."""
    try:
        return next_tokens(rows_BV, [output.sampler for output in outputs])
    except Exception:
        return [None] * len(outputs)


def decode_step(runner: Runner, outputs: Sequence[OutputProcessor]) -> list[Deliver]:
    """One pass over the tokens sampled last, and over drafts behind them where there are any; returns a delivery per
    request."""
    began, setup_s = time.perf_counter(), runner.setup_s
    sequences = [output.request.sequence for output in outputs]
    drafts = [output.draft(runner.most_verified(output.request.sequence)) for output in outputs]
    last = [output.request.token_ids[-1] for output in outputs]
    if not any(drafts):
        rows_BV = runner.decode(sequences, last, commit=[not output.request.stop for output in outputs])
        chosen = _chosen(rows_BV, outputs)
        step_time = StepTime(time.perf_counter() - began, runner.setup_s - setup_s)
        found = zip(outputs, rows_BV, chosen, strict=True)
        return [partial(output.process, logits_V, token, step_time) for output, logits_V, token in found]
    verified = runner.verify(sequences, [[token, *draft] for token, draft in zip(last, drafts, strict=True)])
    tokens = iter(torch.cat([greedy_tokens(one.logits_TV) for one in verified]).tolist())
    step_time = StepTime(time.perf_counter() - began, runner.setup_s - setup_s)
    return [
        partial(output.process_verified, draft, one, list(islice(tokens, len(draft) + 1)), step_time)
        for output, draft, one in zip(outputs, drafts, verified, strict=True)
    ]
