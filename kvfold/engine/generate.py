"""The decode loop over a batch of requests: sample, match stops, step.

Where all requests are greedy and steps are captured, decoding is asynchronous (async_decode.py).

With a drafter, a step runs the sampled token and a draft behind it (speculative decoding). Sampling continues through
the logits of that pass while it agrees with the draft; each accepted token enters the KV cache as if it had had a step
of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from kvfold.engine.async_decode import AsyncTokens, InFlightStep, can_decode_async, launch_next
from kvfold.engine.output_processor import OutputProcessor, StepTime
from kvfold.engine.request import Request
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import greedy_tokens

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
    runner: Runner, outputs: Sequence[OutputProcessor], in_flight: InFlightStep | None
) -> tuple[list[Deliver], InFlightStep | None]:
    """One step, and the next one launched before the host waits for this one's tokens; `in_flight`: this step, if it
    was launched already. Returns a delivery per request, and the step that is in flight now."""
    began, setup_s = time.perf_counter(), runner.setup_s
    sequences = [output.request.sequence for output in outputs]
    if in_flight is None:
        rows_BV = runner.decode(sequences, [output.request.token_ids[-1] for output in outputs])
        rows, tokens = list(rows_BV), AsyncTokens(sequences, rows_BV)
    else:
        rows, tokens = [in_flight.keep(sequence) for sequence in sequences], in_flight.tokens
    more = [output.request.sequence for output in outputs if output.num_left > 1]
    in_flight = launch_next(runner, more, tokens.on_device(more)) if more else None
    greedy = tokens.wait(sequences)
    step_time = StepTime(time.perf_counter() - began, runner.setup_s - setup_s)
    found = zip(outputs, rows, greedy, strict=True)
    return [partial(output.process, logits_V, token, step_time) for output, logits_V, token in found], in_flight


def decode_step(runner: Runner, outputs: Sequence[OutputProcessor]) -> list[Deliver]:
    """One pass over the tokens sampled last, and over drafts behind them where there are any; returns a delivery per
    request."""
    began, setup_s = time.perf_counter(), runner.setup_s
    sequences = [output.request.sequence for output in outputs]
    drafts = [output.draft(runner.most_verified(output.request.sequence)) for output in outputs]
    last = [output.request.token_ids[-1] for output in outputs]
    if not any(drafts):
        rows_BV = runner.decode(sequences, last, commit=[not output.request.stop for output in outputs])
        greedy = greedy_tokens(rows_BV).tolist()  # the one host-device synchronisation of a step
        step_time = StepTime(time.perf_counter() - began, runner.setup_s - setup_s)
        found = zip(outputs, rows_BV, greedy, strict=True)
        return [partial(output.process, logits_V, token, step_time) for output, logits_V, token in found]
    verified = runner.verify(sequences, [[token, *draft] for token, draft in zip(last, drafts, strict=True)])
    tokens = iter(torch.cat([greedy_tokens(one.logits_TV) for one in verified]).tolist())
    step_time = StepTime(time.perf_counter() - began, runner.setup_s - setup_s)
    return [
        partial(output.process_verified, draft, one, list(islice(tokens, len(draft) + 1)), step_time)
        for output, draft, one in zip(outputs, drafts, verified, strict=True)
    ]
