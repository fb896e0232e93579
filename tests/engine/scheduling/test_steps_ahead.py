"""A task that begins to decode waits for the step in flight, which is not run in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from kvfold.engine.cuda_graphs import CudaGraphs
from kvfold.engine.scheduling.decode_manager import DecodeManager
from kvfold.engine.scheduling.prefill_manager import TimeSlice
from kvfold.engine.scheduling.queues import Queues
from kvfold.engine.scheduling.task import Task
from kvfold.models.loader import Model
from tests.engine.jobs import Heard, job
from tests.engine.runs import make_runner
from tests.tiny import prompt


class Counted(CudaGraphs):
    """Captured steps, and the sequences of each."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def decode(self, hf: Any, sequences: Any, tokens: Any, **options: Any) -> Tensor | None:
        self.sizes.append(len(sequences))
        return super().decode(hf, sequences, tokens, **options)


class Decoding:
    """Tasks whose prompts are read, one decode step at a time."""

    def __init__(self, model: Model) -> None:
        self.model, self.runner, self.queues = model, make_runner(model), Queues(lambda: False)
        self.graphs = self.runner.graphs = Counted()
        clock: Callable[[], float] = lambda: 0.0  # noqa: E731
        slice_ = TimeSlice(clock, model.arena.device)
        self.manager = DecodeManager(self.runner, self.queues, slice_, clock, lambda: None)

    def add(self, seed: int, num_new: int) -> Heard:
        one, heard = job(self.runner, prompt(20, seed=seed), max_new_tokens=num_new)
        task = Task(one, self.runner, self.model.tokenizer, in_chunks=True)
        while task.is_prefilling:
            task.prefill(lambda: False)
        self.queues.decoding.append(task)
        return heard

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.manager.run()


@pytest.mark.parametrize("at", [1, 2, 5])
def test_no_step_is_run_in_vain_when_a_task_joins(model: Model, at: int) -> None:
    alone = []
    for seed in (1, 2):
        decoding = Decoding(model)
        heard = decoding.add(seed, 12)
        decoding.steps(13)
        alone.append(heard.text)
    decoding = Decoding(model)
    first = decoding.add(1, 12)
    decoding.steps(at)
    second = decoding.add(2, 12)
    decoding.steps(16)
    assert [first.text, second.text] == alone
    assert [first.end().num_tokens, second.end().num_tokens] == [12, 12]
    assert sum(decoding.graphs.sizes) == 2 * 11  # a token of each reply but its last
