"""Files of a benchmark run: a folder of plain JSON that can be resumed, merged and reported.

    run.json            what was run: command, versions, model, settings
    rows.jsonl          one row per sample, policy, memory and mode
    prompts.jsonl       one row per sample: what was asked
    diagnostics.jsonl   for a few samples: kept slots against the attention of later tokens
    *.jsonl.xz          the same, compressed, in an archived run; a resumed run appends to *.jsonl beside it

Rows are appended, so a killed run resumes where it stopped; a truncated last line is dropped. A folder is bound to one
configuration; shards of one run are runs of the same.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvfold.atomic_io import replacing, write_whole
from kvfold.errors import InputError

Mode = Literal["known", "unknown"]
MODES: tuple[Mode, ...] = ("known", "unknown")
RUN, ROWS, PROMPTS, DIAGNOSTICS = "run.json", "rows.jsonl", "prompts.jsonl", "diagnostics.jsonl"
TOO_SMALL = "too small"  # the policy cannot be had in so few bytes
OUT_OF_MEMORY = "out of memory"
TOO_LONG = "longer than the model's context"
NEEDS_QUESTION = "its selector needs the question"  # which is unknown in this mode
PROTECTED = "text that always stays is longer than the size"
OWN = "own"  # memory of a policy as it is written: what it takes is in its rows
Key = tuple[str, str, int, int, str, str, str]  # workload, task, length, index, mode, policy, memory
# What processes of one run may differ in.
_CIRCUMSTANCES = ("command", "commit", "versions", "device", "started", "shard")


@dataclass(frozen=True)
class Run:
    """What all rows of a run share."""

    command: str
    commit: str  # or several, where a run was resumed on another: "a1b2c3d, e4f5a6b"
    versions: Mapping[str, str]  # kvfold, torch, transformers, python, triton
    device: str
    started: str  # UTC, as in 2026-11-15T12:00:00Z
    model: str
    weights: str  # digest
    dtype: str  # of weights and attention, then of the cache: "float32/bfloat16"
    suite: str
    seed: int
    samples: int  # of each task
    lengths: tuple[int, ...]
    workloads: tuple[str, ...]  # "needle:needles_1"
    modes: tuple[Mode, ...]
    policies: tuple[str, ...]  # without sizes
    memories: tuple[str, ...]  # "12.5%", or OWN
    haystack: str
    options: Mapping[str, str] = field(default_factory=dict)  # files of workloads, and embedders, with their digests
    fidelity: int = 0  # samples of each task that are compared without a score
    diagnostics: int = 0  # samples of each task
    shard: str = "0/1"

    @property
    def configuration(self) -> dict[str, Any]:
        """What rows depend on: runs with the same one belong together."""
        return {name: value for name, value in asdict(self).items() if name not in _CIRCUMSTANCES}


@dataclass(frozen=True)
class _CellRow:
    """A line about one sample under one policy, in one memory and mode."""

    workload: str
    task: str
    length: int  # as asked for
    index: int
    mode: Mode
    policy: str  # as asked for, without a size
    memory: str  # "12.5%" of the full cache's bytes, or OWN
    resolved: str  # the policy that was run, with its size

    @property
    def key(self) -> Key:
        return self.workload, self.task, self.length, self.index, self.mode, self.policy, self.memory


@dataclass(frozen=True)
class Row(_CellRow):
    """One answer. Bytes are those after the compression, before an unknown question and the answer are read.

    Without a score, `note` says why the policy could not run. The full cache is policy "full" at memory "100%"; a
    policy that evicts has no rows there, and one that evicts nothing is the same in every memory that it fits. What
    runs as it is written has memory "own".
    """

    prompt_tokens: int = 0
    sent_tokens: int = 0  # of the prompt after shortening; 0: of a run that did not record it
    new_tokens: int = 0
    resident_bytes: int = 0
    full_bytes: int = 0  # of an ordinary bf16 cache of the same tokens, before shortening
    bytes_per_step: int = 0  # stored bytes that one decode step reads
    shorten_s: float = 0.0  # of cutting the text
    prefill_s: float = 0.0  # of the pass that read the prompt for all policies at once
    first_token_s: float = 0.0  # from there to the first token of the answer
    decode_ms: float | None = None  # a step of the whole batch, median; None for a single token
    score: float | None = None  # from 0 to 1
    answer: str = ""
    note: str = ""
    kl: float | None = None  # nats, to the full cache's next token, along its answer
    agreement: float | None = None  # share of tokens with the same most likely one
    bits_lost: float | None = None  # per token of the full cache's answer
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the sample, such as its depth

    @property
    def untimed(self) -> Row:
        """Without what a clock says."""
        return replace(self, shorten_s=0.0, prefill_s=0.0, first_token_s=0.0, decode_ms=None)

    @property
    def sent_share(self) -> float:
        """Tokens sent, of those of the original prompt."""
        return self.sent_tokens / self.prompt_tokens if self.sent_tokens else 1.0


@dataclass(frozen=True)
class PromptRow:
    """What one sample asked."""

    workload: str
    task: str
    length: int
    index: int
    question: str
    answers: tuple[str, ...]
    sha256: str  # of the context
    begin: str  # the first 300 characters of the context
    end: str  # the last 300

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.workload, self.task, self.length, self.index


@dataclass(frozen=True)
class Diagnostic(_CellRow):
    """What the layers of one cache kept: see `kvfold.bench.diagnostics`."""

    layers: tuple[int, ...]  # those that choose: a sliding window does not
    hit_rate: tuple[float, ...]  # by layer: share of the most attended slots that were kept
    mass_kept: tuple[float, ...]  # by layer: share of the later attention that fell on kept slots
    share_kept: tuple[float, ...]  # by layer: share of slots that were kept, the hit rate of chance
    overlap: tuple[tuple[float, ...], ...]  # Jaccard index of every pair of layers


@dataclass(frozen=True)
class Recorded:
    """A run read back."""

    run: Run
    rows: tuple[Row, ...]
    prompts: tuple[PromptRow, ...]
    diagnostics: tuple[Diagnostic, ...]


_Line = TypeVar("_Line", Row, PromptRow, Diagnostic)


def read_run(folder: Path) -> Recorded:
    """All that a run has written so far."""
    run = read_description(folder)
    rows = tuple(read_lines(Row, folder / ROWS))
    return Recorded(
        run, rows, tuple(read_lines(PromptRow, folder / PROMPTS)), tuple(read_lines(Diagnostic, folder / DIAGNOSTICS))
    )


def read_description(folder: Path) -> Run:
    path = folder / RUN
    try:
        return _made(Run, json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError:
        raise InputError(f"{folder} is no run of the benchmark: it has no {RUN}; give a folder that it wrote") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); give a folder that the benchmark wrote") from None


def read_lines(kind: type[_Line], path: Path) -> Iterator[_Line]:
    """The rows of a file, compressed ones first, none if neither exists; a last line that was cut off is left out."""
    compressed = compressed_path(path)
    if compressed.exists():
        try:
            with lzma.open(compressed, "rt", encoding="utf-8", newline="\n") as file:
                yield from _parsed(kind, file, compressed)
        except (lzma.LZMAError, EOFError) as error:
            raise InputError(f"{compressed} is damaged ({error}); take it from the repository again") from None
    if path.exists():
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from _parsed(kind, file, path)


def _parsed(kind: type[_Line], file: Iterable[str], path: Path) -> Iterator[_Line]:
    for number, line in enumerate(file, 1):
        if not line.endswith("\n"):
            return
        where = f"{path}, line {number},"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where} is not JSON ({error}); take the line out") from None
        yield _made(kind, found, where)


def compressed_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.xz")


_Kind = TypeVar("_Kind", Run, Row, PromptRow, Diagnostic)


def _made(kind: type[_Kind], found: Any, where: str) -> _Kind:
    names = {each.name for each in fields(kind)}
    if not isinstance(found, dict) or not found.keys() <= names:
        raise InputError(f"{where} is no {kind.__name__} of a run; it may hold {', '.join(sorted(names))}")
    try:
        return kind(**{name: _frozen(value) for name, value in found.items()})
    except TypeError as error:
        raise InputError(f"{where} is no {kind.__name__} of a run: {error}") from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def write_run(folder: Path, run: Run) -> None:
    """Begin a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RUN, json.dumps(asdict(run), ensure_ascii=False, indent=1) + "\n")


def commits_of(runs: Iterable[Run]) -> str:
    """All that rows of these runs were made on, in order."""
    return ", ".join(dict.fromkeys(commit for run in runs for commit in run.commit.split(", ")))


def append_lines(path: Path, lines: Iterable[Row | PromptRow | Diagnostic]) -> None:
    """In one write, so that a kill leaves whole lines and at most one that is cut off."""
    text = _text(lines)
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)


def write_compressed(path: Path, lines: Iterable[Row | PromptRow | Diagnostic]) -> None:
    """All rows of a run that is kept; the same rows give the same bytes."""
    with replacing(compressed_path(path)) as temporary:
        temporary.write_bytes(lzma.compress(_text(lines).encode(), preset=9))


def _text(lines: Iterable[Row | PromptRow | Diagnostic]) -> str:
    return "".join(json.dumps(_told(line), ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)


def _told(line: Row | PromptRow | Diagnostic) -> dict[str, Any]:
    """What a reader would not fill in by itself: a run has tens of thousands of rows."""
    values = ((each, getattr(line, each.name)) for each in fields(line))
    return {each.name: value for each, value in values if value != _default(each)}


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def drop_cut_line(path: Path) -> None:
    """A killed run may leave half a line, to which the next row would be glued."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


class RunWriter:
    """Appends rows that are missing."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder = folder
        if (folder / RUN).exists():
            there = read_description(folder)
            _check_same(folder, there, run)
            if (commits := commits_of((there, run))) != there.commit:
                write_run(folder, replace(there, commit=commits))
        elif folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder} holds other files and no run; name another folder with --out")
        else:
            write_run(folder, run)
        for name in (ROWS, PROMPTS, DIAGNOSTICS):
            drop_cut_line(folder / name)
        self.done = {row.key for row in read_lines(Row, folder / ROWS)}
        self._prompts = {row.key for row in read_lines(PromptRow, folder / PROMPTS)}
        self._diagnostics = {row.key for row in read_lines(Diagnostic, folder / DIAGNOSTICS)}

    def add_prompts(self, rows: Iterable[PromptRow]) -> None:
        self._append(PROMPTS, rows, self._prompts)

    def add(self, rows: Iterable[Row], diagnostics: Iterable[Diagnostic]) -> None:
        """Diagnostics first: rows tell that a batch is done."""
        self._append(DIAGNOSTICS, diagnostics, self._diagnostics)
        self._append(ROWS, rows, self.done)

    def _append(self, name: str, rows: Iterable[Row | PromptRow | Diagnostic], known: set[Any]) -> None:
        new = [row for row in rows if row.key not in known]
        append_lines(self.folder / name, new)
        known.update(row.key for row in new)


def _check_same(folder: Path, there: Run, run: Run) -> None:
    """InputError if the folder holds a run of another configuration."""
    found = there.configuration | {"shard": there.shard}
    wanted = run.configuration | {"shard": run.shard}
    for name, value in wanted.items():
        if found[name] != value:
            raise InputError(
                f"{folder} holds a run with {name} {_shown(found[name])}, not {_shown(value)}; name another folder "
                "with --out, or give the options of that run"
            )


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
