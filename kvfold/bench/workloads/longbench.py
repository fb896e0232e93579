"""LongBench: real documents and questions, read from files that the user has, scored as the benchmark does.

Three sets (arXiv:2308.14508 and arXiv:2412.15204): LongBench with 21 tasks, LongBench-E with 13 of them at evenly
spread lengths (`qasper_e` …), and LongBench v2 with multiple choice (`v2`). Files are looked for in `folder`:

    TASK.jsonl      LongBench
    TASK_e.jsonl    LongBench-E; also TASK.jsonl, where its rows say so in "dataset"
    data.json       LongBench v2

or come from the hub by `hub=OWNER/NAME`, a dataset of plain files with one configuration per task. (The `datasets`
package no longer runs loading scripts, and the original of LongBench is one: unpack its data.zip and give the folder.)

A prompt longer than the setting's length loses the middle of its context.

Prompts, lengths of replies and metrics (longbench.json) are those of the benchmark, word for word, oddities of spacing
included: a score depends on them.
"""

from __future__ import annotations

import importlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from kvfold.bench.workloads import metrics
from kvfold.bench.workloads.base import Sample, Setting, workload
from kvfold.bench.workloads.files import FileWorkload, Row, read_rows, want
from kvfold.errors import InputError, MissingExtra

_MAX_CHARS_PER_TOKEN = 32  # no text averages more: bounds how much of a long context is ever tokenised
_GROUPS = ((4000, "0-4k"), (8000, "4-8k"))  # of LongBench-E, by words


@dataclass(frozen=True)
class Task:
    prompt: str  # with {context} and, mostly, {input}
    max_new_tokens: int
    metric: str  # of kvfold.bench.workloads.metrics
    chat: bool = True  # whether the benchmark puts the prompt into a chat template
    first_line: bool = False  # whether only the first line of a reply counts
    even: bool = False  # whether LongBench-E has it, at evenly spread lengths


_TASKS: dict[str, Any] = json.loads((files("kvfold.bench.workloads") / "longbench.json").read_text(encoding="utf-8"))
TASKS = {name: Task(**task) for name, task in _TASKS.items()}
EVEN = tuple(name for name, task in TASKS.items() if task.even)
_CHINESE_WORDS = ("token_f1_zh", "rouge_l_zh")  # metrics over words, which jieba has to find


@workload
@dataclass(frozen=True)
class LongBench(FileWorkload):
    folder: Path | None = None
    hub: str = ""

    name: ClassVar[str] = "longbench"
    summary: ClassVar[str] = "question answering, summaries, few-shot learning, counting and code over real documents"
    source: ClassVar[str] = "LongBench, LongBench-E (arXiv:2308.14508) and LongBench v2 (arXiv:2412.15204)"
    metric: ClassVar[str] = (
        "by task: token F1, ROUGE-L, share of named classes, share of numbers, edit similarity, multiple choice"
    )
    differences: ClassVar[str] = (
        "the middle is cut out of the context alone, at characters, so instruction and question stay whole; v2 has no "
        "chain of thought and no retrieval"
    )
    tasks: ClassVar[tuple[str, ...]] = (*(t for t in TASKS if t != "v2"), *(f"{task}_e" for task in EVEN), "v2")

    def __post_init__(self) -> None:
        if self.folder and self.hub:
            raise InputError(f"longbench has two sources, folder={self.folder} and hub={self.hub}; give one")

    def lacks(self, task: str) -> str:
        if _task(task).metric in _CHINESE_WORDS and find_spec("jieba") is None:
            return 'jieba, which is not installed; pip install "kvfold[longbench]"'
        if self.hub or (self.folder and _file(Path(self.folder), task)):
            return ""
        return f"folder=FOLDER that holds {_names(task)[0]}, or hub=OWNER/NAME of a dataset with that task"

    def rows(self, task: str) -> Sequence[Row]:
        if self.hub:
            return _hub_rows(self.hub, task)
        path = _file(Path(self.folder), task) if self.folder else None
        return read_rows(path) if path else ()

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        row = self.row(setting, task, index)
        sample = _read_v2(row, index) if task == "v2" else _read(row, task, index)
        return shorten(sample, setting, start=_task(task).prompt.index("{context}"))

    def score(self, sample: Sample, reply: str) -> float:
        task = _task(sample.task)
        if task.first_line:
            reply = reply.lstrip("\n").split("\n")[0]
        return max(_metric(task, sample)(reply, answer) for answer in sample.answers)

    def oracle(self, sample: Sample) -> str:
        return f"The correct answer is ({sample.answers[0]})" if sample.task == "v2" else sample.answers[0]


def shorten(sample: Sample, setting: Setting, *, start: int = 0) -> Sample:
    """The sample with as much of its context as fits: all up to `start`, then equal parts of beginning and end."""
    before, text = sample.context[:start], sample.context[start:]

    def keep(count: int) -> Sample:
        kept = text if count >= len(text) else text[: (count + 1) // 2] + text[len(text) - count // 2 :]
        return replace(sample, context=before + kept)

    def tokens(count: int) -> int:
        return setting.count_tokens(keep(count).text)

    most = min(len(text), _MAX_CHARS_PER_TOKEN * setting.length)
    if tokens(most) <= setting.length:
        return keep(most)
    if (least := tokens(0)) > setting.length:
        raise InputError(f"prompts of {setting.length} tokens are too short for {sample.task}; give more than {least}")
    return keep(bisect_right(range(most), setting.length, key=tokens) - 1)


def _read(row: Row, name: str, index: int) -> Sample:
    want(row, "input", "context", "answers", where=name)
    task = _task(name)
    before, after = task.prompt.split("{context}")
    facts = _facts(row, task) | {"classes": tuple(row.get("all_classes") or ())}
    if name.endswith("_e"):
        num_words = int(row.get("length", 0))
        facts["words"] = next((name for below, name in _GROUPS if num_words < below), "8k+")
    question = after.replace("{input}", row["input"])
    return Sample(
        name,
        index,
        before + row["context"],
        question,
        tuple(row["answers"]),
        task.max_new_tokens,
        facts=facts,
        num_instruction_chars=len(before),
        query=row["input"],
    )


def _read_v2(row: Row, index: int) -> Sample:
    choices = [f"choice_{letter}" for letter in "ABCD"]
    want(row, "question", "context", "answer", *choices, where="v2")
    task = TASKS["v2"]
    before, after = task.prompt.split("{context}")
    asked = "\n".join([row["question"], "Choices:", *(f"({key[-1]}) {row[key]}" for key in choices)])
    facts = _facts(row, task) | {key: row.get(key, "") for key in ("domain", "difficulty", "length")}
    question = after.replace("{input}", asked)
    return Sample(
        "v2",
        index,
        before + row["context"],
        question,
        (row["answer"],),
        task.max_new_tokens,
        facts=facts,
        num_instruction_chars=len(before),
        query=asked,
    )


def _facts(row: Row, task: Task) -> dict[str, object]:
    return {"id": row.get("_id", ""), "chat": task.chat}


def _task(name: str) -> Task:
    return TASKS[name.removesuffix("_e")]


def _metric(task: Task, sample: Sample) -> Callable[[str, str], float]:
    if task.metric != "classification":
        metric: Callable[[str, str], float] = getattr(metrics, task.metric)
        return metric
    return partial(metrics.classification, classes=sample.listed("classes"))


def _names(task: str) -> tuple[str, ...]:
    """Files that may hold a task, the best first."""
    if task == "v2":
        return ("data.json",)
    return (f"{task}.jsonl", f"{task.removesuffix('_e')}.jsonl") if task.endswith("_e") else (f"{task}.jsonl",)


def _file(folder: Path, task: str) -> Path | None:
    paths = (folder / name for name in _names(task))
    return next((path for path in paths if path.is_file() and _said_task(path, task) == task), None)


@lru_cache(maxsize=256)
def _said_task(path: Path, task: str) -> str:
    """The task that the first row names; rows that name none are of the task they are named after."""
    if task == "v2":
        return task
    with path.open(encoding="utf-8") as lines:
        try:
            return str(json.loads(next(lines)).get("dataset", path.stem))
        except (StopIteration, ValueError, AttributeError):
            raise InputError(f"{path} does not begin with a JSON object on a line of its own") from None


@lru_cache(maxsize=64)
def _hub_rows(hub: str, task: str) -> tuple[Row, ...]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f'hub={hub} is read with datasets, which is not installed; pip install "kvfold[longbench]", or give folder='
        ) from error
    try:
        part = {"split": "train"} if task == "v2" else {"name": task, "split": "test"}
        return tuple(datasets.load_dataset(hub, **part))
    except Exception as error:  # whatever the hub, the network or the format made of it
        raise InputError(f"the dataset {hub} gives no {task}: {error}; download it and give folder=FOLDER") from error
