"""What two environments tell each other: prompts as token ids with settings one way, answers as token ids the other.

kvpress pins an older transformers than kvfold runs on, so neither can import the other. Each side reads and writes
JSON lines; this file needs nothing but the standard library, and both import it.

    WORK/jobs.jsonl      Header, then one Prompt per line          written by kvfold's side
    WORK/SIDE.jsonl      Origin, then one Answer per line          SIDE: kvfold or peer
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

FORMAT = "kvfold-peers-1"
JOBS = "jobs.jsonl"
WHOLE = 1  # the ratio of a cache that nothing is dropped from
Kind = Literal["full", "press", "masked", "quantized"]
Mode = Literal["known", "unknown"]


@dataclass(frozen=True)
class Method:
    """One way to hold a cache, by its name on both sides."""

    name: str  # in the peer's rows, e.g. "kvpress:snapkv"
    ours: str  # kvfold's policy without its size; "" where none claims to be the same
    kind: Kind  # masked: a press that hides slots from attention by head, and frees none
    target: str = ""  # the press's class ("Outer:Inner" where one wraps another), or the quantised cache's backend
    arguments: Mapping[str, Any] | None = None

    @property
    def has_ratio(self) -> bool:
        return self.kind in ("press", "masked")


@dataclass(frozen=True)
class Header:
    """What all prompts share."""

    format: str
    command: str  # that asked for these prompts
    commit: str  # of the repository then
    model: str  # catalogue name
    folder: str  # of its weights
    dtype: str  # of weights, attention and cache
    device: str  # cpu or cuda
    eos_token_ids: tuple[int, ...]
    length: int
    seed: int
    samples: int  # of each task
    tasks: tuple[str, ...]  # "needle:needles_1"
    modes: tuple[Mode, ...]
    ratios: tuple[int, ...]  # 4: one slot in four stays
    methods: tuple[Method, ...]
    data: tuple[str, ...] = ()  # input files of workloads, "longbench.folder=…"

    def lanes(self) -> list[tuple[Method, int]]:
        """Every method at every ratio it has."""
        return [(method, ratio) for method in self.methods for ratio in (self.ratios if method.has_ratio else (WHOLE,))]


@dataclass(frozen=True)
class Prompt:
    """Two runs of tokens; with the question known both are compressed, but for the very last token."""

    workload: str
    task: str
    index: int
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    max_new_tokens: int

    def parts(self, mode: Mode) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is compressed, and what is read after that."""
        if mode == "unknown":
            return self.context_ids, self.question_ids
        return self.context_ids + self.question_ids[:-1], self.question_ids[-1:]


@dataclass(frozen=True)
class Origin:
    """Where answers come from."""

    format: str
    side: str
    commit: str
    started: str  # UTC
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """Bytes and slots are those after the compression."""

    workload: str
    task: str
    index: int
    mode: Mode
    method: str  # the name in Header.methods, on both sides
    ratio: int
    token_ids: tuple[int, ...]
    resident_bytes: int
    bytes_per_step: int  # stored bytes that one step reads
    slots: float  # per head, on average
    prefill_s: float
    first_token_s: float
    decode_ms: float | None

    @property
    def key(self) -> tuple[str, str, int, str, str, int]:
        return self.workload, self.task, self.index, self.mode, self.method, self.ratio


_Line = TypeVar("_Line", Header, Prompt, Origin, Answer)


def num_kept(num_tokens: int, ratio: int) -> int:
    """Slots per head: kvfold's `4x` is the ceiling of a quarter."""
    return math.ceil(num_tokens / ratio)


def write_jobs(work: Path, header: Header, prompts: Iterable[Prompt]) -> None:
    work.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in (asdict(header), *map(asdict, prompts)))
    (work / JOBS).write_text(text, encoding="utf-8")


def read_jobs(work: Path) -> tuple[Header, list[Prompt]]:
    first, *rest = _objects(work / JOBS)
    methods = tuple(Method(**found) for found in first.pop("methods"))
    header = _made(Header, {**first, "methods": methods})
    if header.format != FORMAT:
        raise ValueError(f'{work / JOBS} has format "{header.format}", not "{FORMAT}"; write it anew')
    return header, [_made(Prompt, found) for found in rest]


def part_of(text: str) -> tuple[int, int]:
    """ "0/4": the first of four processes, which takes every fourth prompt."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f'"{text}" is no part; write for example 0/4')
    return int(index), int(count)


def read_answers(path: Path) -> tuple[Origin, list[Answer]]:
    first, *rest = _objects(path)
    return _made(Origin, first), [_made(Answer, found) for found in rest]


class AnswerFile:
    """Appends answers, a prompt at a time; a run that was stopped goes on after its last whole line."""

    def __init__(self, path: Path, origin: Origin) -> None:
        self.path = path
        found = path.read_bytes() if path.exists() else b""
        path.write_bytes(found[: found.rfind(b"\n") + 1] or (json.dumps(asdict(origin)) + "\n").encode())
        self.done = {answer.key for answer in read_answers(path)[1]}

    def append(self, answers: Iterable[Answer]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _made(kind: type[_Line], found: Mapping[str, Any]) -> _Line:
    values: dict[str, Any] = {field.name: found[field.name] for field in fields(kind) if field.name in found}
    frozen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return kind(**frozen)
