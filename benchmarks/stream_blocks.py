"""Streaming perplexity, block by block, and resident memory.

Texts differ in difficulty from block to block, so one stream cannot tell drift from difficulty. Streams are therefore
rotations of one joined text: the same block of each stream stands elsewhere in it, and a mean over streams compares
blocks over much the same text.

    joined text   | book 0 ………………………… | book 1 …………… | book 2 ……… |
    stream 0      |-> blocks 0, 1, 2 …
    stream 1                  |-> blocks 0, 1, 2 … and round

The control runs every block in a fresh sequence of the same policy: a stream without drift stays at its control,
however long it is. (The control starts a block without context, which costs it a little.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy


@dataclass(frozen=True)
class Run:
    """A policy to read streams with; `fresh` reads every block in a sequence of its own."""

    policy: str
    fresh: bool = False


RUNS = {
    "stream": Run("streaming + 1024tok + slot"),
    "control": Run("streaming + 1024tok + slot", fresh=True),
    "recent": Run("recent + 1024tok + slot + protect(none)"),
    "original": Run("streaming + 1024tok"),
}
DEFAULT_RUNS = ("stream", "control", "recent")


@dataclass(frozen=True)
class Block:
    """One block of one stream under one run. Memory is what is held after the block, by the whole process."""

    run: str
    policy: str
    stream: int
    block: int
    end: int  # tokens of the stream read so far
    log_loss: float  # nats per token, mean over the block
    resident_bytes: int  # of the sequence
    arena_bytes: int
    cuda_bytes: int | None  # held by tensors; None without a GPU
    cuda_reserved_bytes: int | None  # held by the allocator
    host_bytes: int | None  # resident set; None where the system does not tell
    s: float

    @property
    def key(self) -> tuple[str, int, int]:
        return self.run, self.stream, self.block


def rotations(tokens: Sequence[int], num_streams: int, num_tokens: int) -> list[list[int]]:
    """Streams that start at even steps through the tokens and go round."""
    if not tokens or num_streams < 1:
        raise InputError(f"{num_streams} streams of a text of {len(tokens)} tokens; give text, and at least one stream")
    starts = [index * len(tokens) // num_streams for index in range(num_streams)]
    return [[tokens[(start + i) % len(tokens)] for i in range(num_tokens)] for start in starts]


def read_blocks(model: Model, name: str, stream: int, tokens: Sequence[int], block_len: int) -> Iterator[Block]:
    """Run one stream under one of RUNS; all pages are freed, also if it raises."""
    if block_len < 2 or not tokens or len(tokens) % block_len:
        raise InputError(f"{len(tokens)} tokens are no whole blocks of {block_len}; blocks have at least 2 tokens")
    run, policy = RUNS[name], Policy.parse(RUNS[name].policy)
    runner = Runner(model.hf, model.spec, model.arena)
    sequence = runner.new_sequence(policy)
    try:
        for index in range(len(tokens) // block_len):
            if run.fresh:
                sequence.release()
                sequence = runner.new_sequence(policy)
            part = tokens[index * block_len : (index + 1) * block_len]
            began = time.perf_counter()
            log_loss = -runner.logprobs(sequence, part).double().mean().item()
            seconds = time.perf_counter() - began
            yield Block(name, run.policy, stream, index, (index + 1) * block_len, log_loss, *_memory(sequence), seconds)
    finally:
        sequence.release()


def _memory(sequence: SequenceCache) -> tuple[int, int, int | None, int | None, int | None]:
    """In the order of Block's fields."""
    device = sequence.arena.device
    on_gpu = device.type == "cuda"
    return (
        sequence.resident_bytes,
        sequence.arena.used_bytes,
        torch.cuda.memory_allocated(device) if on_gpu else None,
        torch.cuda.memory_reserved(device) if on_gpu else None,
        host_bytes(),
    )


def host_bytes() -> int | None:
    """The resident set of this process now."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else None
