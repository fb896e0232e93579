"""Ways to answer a question about a long text, and the peaks of memory that each takes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import kvfold
from benchmarks.recurse_text import Question
from kvfold.policy import Policy
from kvfold.recurse.chat_prompts import PromptStyle
from kvfold.recurse.chunks import num_calls
from kvfold.recurse.context import Context
from kvfold.recurse.reader import Reader
from kvfold.recurse.result import ReadResult
from kvfold.shortening.shorten import shorten_text
from kvfold.shortening.tokens import TokenOffsets


@dataclass(frozen=True)
class Arm:
    """`kind`: recursive, sequential (a map-reduce without forks: one call at a time, nothing shared), truncated (one
    pass over what fits the window), shorten (one pass over what `shorten(rank)` keeps)."""

    kind: str
    policy: str = "full"

    def num_tokens(self, length: int, chunk: int, window: int, around: int) -> int:
        """Tokens that a model prefills for a text of this length, merges left out."""
        if self.kind == "truncated":
            return min(length, window or length)
        if self.kind == "shorten":
            return chunk + around
        replays = 2 if "kvzip" in self.policy else 1
        return replays * length + num_calls(length, chunk) * (around if self.kind == "sequential" else around // 4)


@dataclass
class Peaks:
    """Bytes: of KV pages in use; and of the process, or of the GPU beside free KV pages."""

    arena: int = 0
    memory: int = 0


@contextmanager
def peaks(model: kvfold.Model) -> Iterator[Peaks]:
    """The highest values while it is open."""
    found, arena = Peaks(), model.arena
    arena.peak_bytes = arena.used_bytes
    is_cuda = model.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts anew
    yield found
    found.arena = arena.peak_bytes
    if is_cuda:
        found.memory = torch.cuda.max_memory_allocated(model.device) - arena.capacity_bytes + arena.peak_bytes
    else:
        status = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        found.memory = int(status[1]) * 1024 if status else 0


@dataclass(frozen=True)
class Outcome:
    """One question, answered."""

    is_right: bool
    calls: int
    seconds: float
    peaks: Peaks
    result: ReadResult

    def as_row(self) -> dict[str, object]:
        usage = self.result.usage
        return {
            "right": self.is_right,
            "calls": self.calls,
            "seconds": self.seconds,
            "arena_mb": self.peaks.arena / 1e6,
            "memory_mb": self.peaks.memory / 1e6,
            "ratio": usage.full_bytes / max(1, usage.resident_bytes),
            "dropped": self.result.num_dropped,
            "answer": self.result.text[:80],
        }


def run(
    model: kvfold.Model, arm: Arm, asked: Question, chunk: int, width: int | None, prompts: PromptStyle = "auto"
) -> Outcome:
    """Seconds count everything but CUDA graph capture: shortening, tokenizing, reading, merging."""
    text = _head(model, asked, prompts) if arm.kind == "truncated" else asked.text
    with peaks(model) as found:
        began = time.perf_counter()
        if arm.kind == "shorten":
            plan = Policy.parse(f"shorten(rank, {chunk}tok, keep=none, embedder=tfidf)").shorten
            assert plan is not None
            text = shorten_text(text, plan, question=asked.question, tokenizer=model.tokenizer).text
        is_plain = arm.kind in ("shorten", "truncated")
        shares = arm.kind != "sequential"
        with Reader(
            model,
            Context(text),
            asked.question,
            arm.policy,
            chunk="auto" if is_plain else chunk,
            width=width if shares else 1,
            shares=shares,
            prompts=prompts,
        ) as reader:
            result = reader.read()
        seconds = time.perf_counter() - began - result.usage.setup_s
    return Outcome(right(result.text, asked.answer), result.usage.calls, seconds, found, result)


def right(answer: str, expected: str) -> bool:
    """Exact match of the first number of four digits."""
    return re.findall(r"\b\d{4}\b", answer)[:1] == [expected]


def _head(model: kvfold.Model, asked: Question, prompts: PromptStyle) -> str:
    """What fits one pass, from the begin of the text."""
    with Reader(model, Context("x"), asked.question, prompts=prompts) as reader:
        room = reader.chunk_tokens
    starts = TokenOffsets.of(asked.text, model.tokenizer).starts
    return asked.text if len(starts) <= room else asked.text[: int(starts[room])]


def sharing(
    model: kvfold.Model, asked: Question, chunk: int, width: int | None, count: int, prompts: PromptStyle = "auto"
) -> dict[str, float]:
    """Seconds of the first parts, once as forks in batches and once one by one with nothing shared, and the factor.

    `tokens_read` counts those of the second. On a GPU both run twice, and the second time counts: kernels are compiled
    when they first run.
    """
    with Reader(model, Context(asked.text), asked.question, chunk=chunk, prompts=prompts) as reader:
        asked_of = [reader.reading.prompt(piece.text) for piece in reader.pieces[:count]]
        reading = reader.reading
    usages = []
    for shares in (True, False):
        for _ in range(2 if model.device.type == "cuda" else 1):
            with reading.calls(model, width=width if shares else 1, shares=shares) as calls:
                calls.ask_batch(asked_of)
        usages.append(calls.usage)
    shared, sequential = usages
    return {
        "calls": len(asked_of),
        "tokens_read": sequential.tokens_read,
        "shared_s": shared.seconds,
        "sequential_s": sequential.seconds,
        "factor": sequential.seconds / shared.seconds,
    }
