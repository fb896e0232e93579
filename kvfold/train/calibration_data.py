"""Calibration data: prompts of the benchmark's workloads under separate seeds, or text files.

The kinds alternate, so that any number of texts is a mixture: prose with needles, records, conversations, documents and
lists. Benchmarks use small seeds; `OWN_SEEDS` keeps calibration prompts apart from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvfold.bench.haystack import read_text
from kvfold.bench.prompts import PromptBuilder
from kvfold.bench.workloads import Setting, find
from kvfold.errors import InputError
from kvfold.plurals import counted
from kvfold.train.traces import MIN_LEN

OWN_SEEDS = 1_000_003
KINDS = (
    ("needle", "needles_3"),
    ("rag", "planted"),
    ("chat", "turns"),
    ("ruler", "niah_multikey_1"),
    ("kv", "kv"),
    ("rewrite", "rename"),
    ("lines", "lines"),
)


def own_texts(tokenizer: Any, count: int, length: int, seed: int) -> Iterator[list[int]]:
    """`count` prompts of about `length` tokens, without their questions."""
    prompter = PromptBuilder(tokenizer)
    setting = Setting(length, OWN_SEEDS + seed, prompter.count_tokens)
    for index in range(count):
        name, task = KINDS[index % len(KINDS)]
        sample = find(name).sample(setting, task, index // len(KINDS))
        yield list(prompter.prompt(sample).context_ids)


def file_texts(tokenizer: Any, paths: Sequence[Path], count: int, length: int) -> Iterator[list[int]]:
    """Pieces of `length` tokens of the files, evenly spaced, `count` in all or as many as there are."""
    ids = [token for path in paths for token in tokenizer(read_text(path), add_special_tokens=False)["input_ids"]]
    begins = range(0, len(ids) - length + 1, length)
    if len(begins) < 2 or length < MIN_LEN:
        raise InputError(
            f"the texts have {counted(len(ids), 'token')}, {counted(len(begins), 'piece')} of {length} (--length), and "
            f"2 of at least {MIN_LEN} are needed; {length_advice([len(ids)])}"
        )
    step = max(1, len(begins) // count)
    return (list(ids[begin : begin + length]) for begin in begins[::step][:count])


def length_advice(lens: Sequence[int]) -> str:
    """The lengths of which texts of `lens` tokens have two pieces: the longest two, or halves of the longest."""
    longest, second, *_ = [*sorted(lens, reverse=True), 0, 0]
    most = max(longest // 2, second)
    if most < MIN_LEN:
        return f"give texts of at least {2 * MIN_LEN} tokens"
    return f"use --length {MIN_LEN}" if most == MIN_LEN else f"use a --length from {MIN_LEN} to {most}"
