"""Configuration of a benchmark run: a suite fills in defaults, and errors are raised before a model loads."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvfold.bench import environment, plan
from kvfold.bench.haystack import OWN_PROSE, Haystack, from_text, prose, read_text
from kvfold.bench.plan import Shard
from kvfold.bench.record import MODES, OWN, Mode, Run
from kvfold.bench.shortened import embedder_digests
from kvfold.bench.size_cache import FULL, cells, share_of
from kvfold.bench.suites import find_suite
from kvfold.core import ModelSpec
from kvfold.errors import InputError, KvfoldWarning, PolicyError
from kvfold.models.loader import Model

_THOUSAND = 1024  # 4k is 4096 tokens


@dataclass(frozen=True)
class BenchConfig:
    """Options of a run; None takes the suite's. Validated on construction."""

    suite: str = "quick"
    workloads: Sequence[str] | None = None
    policies: Sequence[str] | None = None
    also: Sequence[str] = ()  # policies beside those
    memories: Sequence[str] | None = None
    lengths: Sequence[int] | None = None
    samples: int | None = None
    modes: Sequence[Mode] | None = None
    seed: int = 0
    fidelity: int | None = None
    diagnostics: int | None = None
    haystack: Path | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of workloads: plan.workload_options
    shard: Shard = field(default_factory=Shard)

    def __post_init__(self) -> None:
        for memory in self._memories:
            if memory != OWN:
                share_of(memory)
        cells(self._named, self._memories)
        if unknown := [mode for mode in self.chosen_modes if mode not in MODES]:
            raise InputError(f'no mode "{unknown[0]}"; modes: {", ".join(MODES)}')
        if not self.chosen_modes or not self._memories:
            raise InputError("there is nothing to run; give one mode and one memory or more")
        _ = self.tasks

    @cached_property
    def tasks(self) -> list[plan.Task]:
        names = find_suite(self.suite).workloads if self.workloads is None else self.workloads
        return plan.tasks(names, self.options)

    @property
    def looks_for_sizes(self) -> bool:
        return any(memory != OWN for memory in self._memories)

    @property
    def chosen_modes(self) -> tuple[Mode, ...]:
        return find_suite(self.suite).modes if self.modes is None else tuple(self.modes)

    @property
    def _named(self) -> tuple[str, ...]:
        return tuple(" ".join(policy.split()) for policy in (*(self.policies or ()), *self.also))

    def _policies(self, spec: ModelSpec) -> tuple[str, ...]:
        """The full cache, then the others in order, without those of a suite that this model cannot run."""
        own = find_suite(self.suite).policies() if self.policies is None else ()
        found = [policy for policy in own if policy in self._named or self._can_run(policy, spec)]
        return tuple(dict.fromkeys((FULL, *found, *self._named)))

    def _can_run(self, policy: str, spec: ModelSpec) -> bool:
        try:
            for cell in cells([policy], self._memories):
                cell.check(spec)
        except PolicyError as error:
            warnings.warn(f"{policy} is left out: {error}", KvfoldWarning, stacklevel=2)
            return False
        return True

    @property
    def _memories(self) -> tuple[str, ...]:
        asked = find_suite(self.suite).memories if self.memories is None else self.memories
        return tuple(dict.fromkeys(asked))

    @cached_property
    def filler(self) -> tuple[Haystack, str]:
        """The sentences that samples are filled with, and a name for them that changes with the text."""
        if self.haystack is None:
            return prose, OWN_PROSE
        text = read_text(self.haystack)
        return from_text(text), f"{self.haystack.name} {hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def describe(self, model: Model, command: str) -> Run:
        """The run of this on a model."""
        suite, policies = find_suite(self.suite), self._policies(model.spec)
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (model.spec.dtype, model.spec.kv_dtype))
        return Run(
            command=command,
            commit=environment.commit(),
            versions=environment.versions(),
            device=environment.device_name(model.device),
            started=environment.now(),
            model=Path(model.name).name,
            weights=model.weights_digest,
            dtype="/".join(dtypes),
            suite=self.suite,
            seed=self.seed,
            samples=suite.samples if self.samples is None else self.samples,
            lengths=tuple(suite.lengths if self.lengths is None else self.lengths),
            workloads=tuple(task.label for task in self.tasks),
            modes=self.chosen_modes,
            policies=policies,
            memories=self._memories,
            haystack=self.filler[1],
            options=plan.digests(self.options) | embedder_digests(policies),
            fidelity=suite.fidelity if self.fidelity is None else self.fidelity,
            diagnostics=suite.diagnostics if self.diagnostics is None else self.diagnostics,
            shard=str(self.shard),
        )


def default_folder(run: Run) -> Path:
    """Named by model, suite and a hash of the configuration; every shard has its own."""
    text = json.dumps(run.configuration, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    part = "" if run.shard == "0/1" else f"-{run.shard.replace('/', 'of')}"
    return Path("runs") / f"{run.model}-{run.suite}-{digest}{part}"


def parse_length(text: str) -> int:
    """ "1000" -> 1000, "4k" -> 4096"""
    match = re.fullmatch(r"([0-9]+)(k?)", text.strip())
    if match is None or int(match[1]) < 1:
        raise InputError(f'"{text}" is no length of a prompt; write tokens, for example 1000, or 4k for 4096')
    return int(match[1]) * (_THOUSAND if match[2] else 1)
