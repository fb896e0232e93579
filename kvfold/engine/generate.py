"""The decode loop over a batch of sequences: sample, stop, step.

Where requests are greedy and steps captured, the device runs one step ahead of the host (ahead.py).

With a drafter, a step runs the sampled token and a draft behind it. Sampling then goes on through the logits of that
pass for as long as it says what was drafted; each such token enters the cache as if it had had a step of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from kvfold.engine.async_decode import Ahead, Arriving, can_run_ahead, run_ahead
from kvfold.engine.output_processor import Took, Writer
from kvfold.engine.request import Request, StopReason
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import likeliest_of

__all__ = ["Request", "StopReason", "generate", "step", "step_greedily"]

Tell = Callable[[], None]  # tells one writer what has run; an exception in it is of that one alone


def generate(runner: Runner, requests: Sequence[Request], tokenizer: Any) -> Iterator[tuple[Request, str]]:
    """Run until every request has ended; yields (request, piece of text) as text becomes final."""
    writers = [Writer(request, tokenizer, runner.spec.eos_token_ids) for request in requests]
    greedy = all(writer.is_greedy and can_run_ahead(runner, writer.request.sequence) for writer in writers)
    ahead: Ahead | None = None
    while live := [writer for writer in writers if writer.request.reason is None]:
        for writer in live:
            piece = writer.write()
            if piece:
                yield writer.request, piece
        going = [writer for writer in live if writer.request.reason is None]
        told: Sequence[Tell] = ()
        if going and greedy:
            told, ahead = step_greedily(runner, going, ahead)
        elif going:
            told = step(runner, going)
        for tell in told:
            tell()


def step_greedily(runner: Runner, writers: Sequence[Writer], ahead: Ahead | None) -> tuple[list[Tell], Ahead | None]:
    """A step, and the next one queued behind it before the host waits for this one's tokens; `ahead`: this step, if it
    was queued before. Returns what each writer is to be told, and the step that is queued now."""
    began, setup_s = time.perf_counter(), runner.setup_s
    sequences = [writer.request.sequence for writer in writers]
    if ahead is None:
        rows_BV = runner.decode(sequences, [writer.request.token_ids[-1] for writer in writers])
        rows, arriving = list(rows_BV), Arriving(sequences, rows_BV)
    else:
        rows, arriving = [ahead.keep(sequence) for sequence in sequences], ahead.arriving
    more = [writer.request.sequence for writer in writers if writer.num_left > 1]
    ahead = run_ahead(runner, more, arriving.on_device(more)) if more else None
    likeliest = arriving.wait(sequences)
    took = Took(time.perf_counter() - began, runner.setup_s - setup_s)
    found = zip(writers, rows, likeliest, strict=True)
    return [partial(writer.ran, logits_V, token, took) for writer, logits_V, token in found], ahead


def step(runner: Runner, writers: Sequence[Writer]) -> list[Tell]:
    """One pass over what was sampled last, and over drafts behind it where there are any; returns what each writer is
    to be told."""
    began, setup_s = time.perf_counter(), runner.setup_s
    sequences = [writer.request.sequence for writer in writers]
    drafts = [writer.draft(runner.most_verified(writer.request.sequence)) for writer in writers]
    last = [writer.request.token_ids[-1] for writer in writers]
    if not any(drafts):
        rows_BV = runner.decode(sequences, last, commit=[not writer.request.stop for writer in writers])
        likeliest = likeliest_of(rows_BV).tolist()  # where the host waits for the device, once a step
        took = Took(time.perf_counter() - began, runner.setup_s - setup_s)
        ran = zip(writers, rows_BV, likeliest, strict=True)
        return [partial(writer.ran, logits_V, token, took) for writer, logits_V, token in ran]
    found = runner.verify(sequences, [[token, *draft] for token, draft in zip(last, drafts, strict=True)])
    ahead = iter(torch.cat([likeliest_of(verified.logits_TV) for verified in found]).tolist())
    took = Took(time.perf_counter() - began, runner.setup_s - setup_s)
    return [
        partial(writer.ran_ahead, draft, verified, list(islice(ahead, len(draft) + 1)), took)
        for writer, draft, verified in zip(writers, drafts, found, strict=True)
    ]
