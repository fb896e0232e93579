"""kvfold's workloads as prompts of token ids, the way `kvfold bench` asks them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from benchmarks.peers.exchange import Header, Prompt
from kvfold.bench.plan import workload_options
from kvfold.bench.prompts import PromptBuilder
from kvfold.bench.workloads import Sample, Setting, Workload, find
from kvfold.errors import InputError


class Samples:
    """The samples a header asks for, with the workload that scores each; tasks take turns."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.tokenizer: Any = AutoTokenizer.from_pretrained(header.folder)
        self._prompter = PromptBuilder(self.tokenizer)
        self._setting = Setting(header.length, header.seed, self._prompter.count_tokens)

    def __iter__(self) -> Iterator[tuple[Workload, Sample]]:
        for index in range(self.header.samples):
            for workload, task in map(self._task, self.header.tasks):
                if index < workload.num_samples(task, self.header.samples):
                    yield workload, workload.sample(self._setting, task, index)

    def _task(self, name: str) -> tuple[Workload, str]:
        workload, colon, task = name.partition(":")
        if not colon:
            raise InputError(f'"{name}" names no task; write WORKLOAD:TASK, for example needle:needles_1')
        return find(workload, **workload_options(self.header.data).get(workload, {})), task

    def prompt(self, workload: Workload, sample: Sample) -> Prompt:
        made = self._prompter.prompt(sample)
        ids = made.context_ids, made.question_ids
        return Prompt(workload.name, sample.task, sample.index, *ids, sample.max_new_tokens)

    def text(self, token_ids: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def end_tokens(folder: str) -> tuple[int, ...]:
    """The tokens that end a reply, as the model's own generation settings say."""
    found = GenerationConfig.from_pretrained(folder).eos_token_id
    return () if found is None else tuple(found) if isinstance(found, list) else (found,)
