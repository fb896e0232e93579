"""What a workload of the benchmark is: samples that can be built one by one, and the score of a reply.

Sample i of a task is a function of seed, workload, task, i and setting alone, so that a run can be resumed or sharded.
Its prompt is `context`, then `question`, then the `reply_prefix` that the reply is begun with; whitespace between them
belongs to the strings. Whether the context is compressed before the question is known is the runner's choice.

A new workload is one file with a class that says what its samples are and how replies are scored:

    @workload
    @dataclass(frozen=True)
    class Passkey(Workload):
        name: ClassVar[str] = "passkey"
        ...
        def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample: ...
        def score(self, sample: Sample, reply: str) -> float: ...

Fields of the dataclass are the workload's options, such as the files it reads; each has a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from kvfold.bench.haystack import Haystack, prose
from kvfold.errors import InputError
from kvfold.plugins import load_plugins

BETWEEN = "\n\n"  # question and reply, where no chat template parts them


@dataclass(frozen=True)
class Sample:
    """One prompt and what a right reply holds."""

    task: str
    index: int
    context: str  # may be compressed without the question
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    reply_prefix: str = ""
    facts: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))  # what a table groups by
    num_instruction_chars: int = 0  # first characters of the context, which are never shortened
    query: str = ""  # what is asked, for retrieval; empty: the question

    @property
    def text(self) -> str:
        """The whole prompt without a chat template; a setting's length counts these tokens."""
        return self.context + self.question + (BETWEEN + self.reply_prefix if self.reply_prefix else "")

    def listed(self, name: str) -> tuple[Any, ...]:
        """A fact that is a tuple."""
        found = self.facts[name]
        assert isinstance(found, tuple)
        return found


@dataclass(frozen=True)
class Setting:
    """What all samples of a run have in common."""

    length: int  # tokens of the whole prompt, chat template left out
    seed: int
    count_tokens: Callable[[str], int]
    haystack: Haystack = prose

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"prompts of {self.length} tokens cannot be; give a length of 1 or more")


class Workload(ABC):
    """One benchmark: its tasks, their samples, and the score of a reply."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line: what it tests
    source: ClassVar[str]  # paper or benchmark
    metric: ClassVar[str]  # one line
    differences: ClassVar[str]  # from the source, one line; "none" if there are none
    tasks: ClassVar[tuple[str, ...]]

    @abstractmethod
    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        """Sample `index` of a task; `random` is seeded for this sample and no other."""

    @abstractmethod
    def score(self, sample: Sample, reply: str) -> float:
        """From 0 to 1; `reply` is what the model wrote after the reply prefix."""

    def oracle(self, sample: Sample) -> str:
        """A perfect reply."""
        return ", ".join(sample.answers)

    def lacks(self, task: str) -> str:
        """What must be given before this task can run, as in "squad=FILE, …"; empty if nothing."""
        return ""

    def num_samples(self, task: str, wanted: int) -> int:
        """How many of the samples wanted a task has."""
        return wanted

    def num_sharing(self, task: str) -> int:
        """How many samples in a row have the same context, to be read once where questions are unknown."""
        return 1

    @property
    def ready(self) -> tuple[str, ...]:
        """The tasks that can run with the options given."""
        return tuple(task for task in self.tasks if not self.lacks(task))

    def sample(self, setting: Setting, task: str, index: int) -> Sample:
        """One sample by itself."""
        self.check(task)
        return self.build(setting, task, index, Random(f"{setting.seed}/{self.name}/{task}/{index}"))

    def samples(self, setting: Setting, count: int, tasks: Sequence[str] = ()) -> Iterator[Sample]:
        """`count` samples of each named task, or of each that is ready; tasks take turns, so any prefix is balanced.
        A task that has fewer ends with its last."""
        chosen = tuple(tasks) or self.ready or self.tasks  # the last: to be refused by name
        for task in chosen:
            self.check(task)
        limits = {task: self.num_samples(task, count) for task in chosen}
        pairs = ((task, index) for index in range(count) for task in chosen if index < limits[task])
        return (self.sample(setting, task, index) for task, index in pairs)

    def check(self, task: str) -> None:
        if task not in self.tasks:
            raise InputError(f'workload {self.name} has no task "{task}"; tasks: {", ".join(self.tasks)}')
        if missing := self.lacks(task):
            raise InputError(f"task {task} of workload {self.name} needs {missing}")


_PACKAGE = "kvfold.bench.workloads"
_Kind = TypeVar("_Kind", bound=type[Workload])
_kinds: dict[str, type[Workload]] = {}


def workload(kind: _Kind) -> _Kind:
    """Class decorator: make a frozen dataclass known by its `name`."""
    known = _kinds.get(kind.name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        both = f"{known.__module__}.{known.__qualname__} and {kind.__module__}.{kind.__qualname__}"
        raise InputError(f'workload "{kind.name}" is registered twice, by {both}')
    if not is_dataclass(kind):
        raise InputError(f'workload "{kind.name}": {kind.__name__} must be a frozen dataclass')
    _kinds[kind.name] = kind
    return kind


def workloads() -> tuple[Workload, ...]:
    """Every workload with its default options, sorted by name."""
    kinds = _load()
    return tuple(kinds[name]() for name in sorted(kinds))


def find(name: str, **options: Any) -> Workload:
    """The workload of this name, with the options given."""
    kinds = _load()
    if name not in kinds:
        raise InputError(f'no workload "{name}"; workloads: {", ".join(sorted(kinds))}')
    allowed = [field.name for field in fields(kinds[name])]  # type: ignore[arg-type]  # checked when registered
    if unknown := sorted(set(options) - set(allowed)):
        raise InputError(f'workload {name} has no option "{unknown[0]}"; options: {", ".join(allowed) or "none"}')
    return kinds[name](**options)


def _load() -> dict[str, type[Workload]]:
    """Import every file beside this one: each registers what it defines."""
    for module in iter_modules(import_module(_PACKAGE).__path__):
        import_module(f"{_PACKAGE}.{module.name}")
    load_plugins("kvfold.workloads")
    return _kinds
