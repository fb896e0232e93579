"""Short prompts that run through a layer in one call: tokens and caches are those of prompts that run alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.engine.scheduling import scheduler as scheduler_module
from kvfold.engine.scheduling.jobs import SequenceStart
from kvfold.engine.scheduling.scheduler import Scheduler
from kvfold.errors import OutOfPages, PrefixLost
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.score.base import View
from kvfold.score.keys import KNorm
from tests.engine.jobs import Fresh, Heard, job
from tests.engine.runs import kept, make_runner, make_sequence
from tests.tiny import prompt

PROMPTS = [prompt(length, seed=length) for length in (5, 40, 9, 33, 12, 7)]
LONGER = [prompt(length, seed=length) for length in (70, 33, 101, 70, 9)]


class Counting(Runner):
    """Counts the sequences of every prefill."""

    def __init__(self, model: Model, chunk_len: int = 512) -> None:
        super().__init__(model.hf, model.spec, model.arena, chunk_len=chunk_len, joins=True)
        self.counts: list[int] = []
        self.joined_lens: list[int] = []  # tokens of passes of several sequences

    def prefill(self, sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]], **options: Any) -> Tensor:
        self.counts.append(len(sequences))
        self.joined_lens += [sum(map(len, tokens))] if len(sequences) > 1 else []
        return super().prefill(sequences, tokens, **options)


def prefilled(
    model: Model, runner: Runner, policy: str, prompts: Sequence[Sequence[int]] = PROMPTS
) -> tuple[list[int], list[SequenceCache], Tensor]:
    """The tokens of each call of a decoder layer, the sequences and their logits; without `joined_len` prompts come one
    by one."""
    calls: list[int] = []
    hook = model.hf.model.layers[0].mlp.register_forward_hook(lambda module, args, out: calls.append(out.shape[1]))
    sequences = [make_sequence(runner, policy) for _ in prompts]
    try:
        if runner.joined_len:
            return calls, sequences, runner.prefill(sequences, prompts)
        alone = [runner.prefill([one], [ids]) for one, ids in zip(sequences, prompts, strict=True)]
        return calls, sequences, torch.cat(alone)
    finally:
        hook.remove()


POLICIES = [
    "full",
    "keydiff + 2x + protect(none) + int4",
    "knorm + 2x + protect(sinks=1, recent=50%)",
    "lagkv(sinks=2, lag=4) + 10tok + protect(none)",
    "keydiff + ada + 2x + protect(none) + int4",
    "snapkv(window=2) + ada + 2x + protect(none)",
    "fastkv(rate=0.5, layer=0)",
]


@pytest.mark.parametrize("prompts", [PROMPTS, LONGER], ids=["short", "longer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_of_one_call_are_those_of_many(model: Model, policy: str, prompts: list[list[int]]) -> None:
    runner, joins = make_runner(model), Counting(model)
    calls, alone, expected = prefilled(model, runner, policy, prompts)
    joined_calls, together, found = prefilled(model, joins, policy, prompts)
    assert (calls, joined_calls) == ([len(ids) for ids in prompts], [sum(map(len, prompts))])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert [kept(sequence) for sequence in together] == [kept(sequence) for sequence in alone]
    assert [one.last_compressed_len for one in together] == [one.last_compressed_len for one in alone]
    for one, other in zip(together, alone, strict=True):
        for mine, its in zip(one.tail.layers, other.tail.layers, strict=True):
            torch.testing.assert_close(mine.state, its.state, atol=1e-5, rtol=1e-4)
    steps = [one.decode(sequences, [3] * len(prompts)) for one, sequences in ((runner, alone), (joins, together))]
    torch.testing.assert_close(*steps, atol=2e-4, rtol=1e-4)
    for sequence in (*alone, *together):
        sequence.release()


def test_slots_of_all_prompts_are_scored_at_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[list[int]] = []

    def score(scorer: KNorm, view: View) -> Tensor:
        rows.append(view.len_R.tolist())
        return scored(scorer, view)

    scored = KNorm.score
    monkeypatch.setattr(KNorm, "score", score)
    _, sequences, _ = prefilled(model, Counting(model), "knorm + 2x + protect(none)")
    lens = [length for length in map(len, PROMPTS) if length > 32]  # shorter ones are kept whole
    num_heads = model.spec.layers[0].num_kv_heads
    assert rows == [[length for length in lens for _ in range(num_heads)]] * model.spec.num_layers
    for sequence in sequences:
        sequence.release()


def test_a_call_takes_so_many_tokens_and_one_piece_of_a_prompt(model: Model) -> None:
    calls, sequences, _ = prefilled(model, Counting(model, chunk_len=16), "full")
    assert calls == [5, 16, 16, 8, 9, 16, 16, 1 + 12, 7]  # 5 | 16 16 8 | 9 | 16 16 1 | 12 | 7
    for sequence in sequences:
        sequence.release()


def written(model: Model, ids: Sequence[int], num_new: int) -> str:
    """By a request of its own."""
    runner = make_runner(model)
    sequence = runner.new_sequence(Policy.parse("full"))
    request = Request(sequence, runner.prefill([sequence], [ids])[0], num_new)
    text = "".join(piece for _, piece in generate(runner, [request], model.tokenizer))
    sequence.release()
    return text


class Lossy(Fresh):
    """Its stored prefix turns out bad when it is read for the first time."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.num_lost = 0

    def begin(self) -> SequenceStart:
        found = super().begin()
        if not self.num_lost:
            found.sequence.loading = BadLayers()
        return found

    def lost(self) -> None:
        self.num_lost += 1


class BadLayers:
    def __init__(self) -> None:
        self.then: Callable[[], None] = lambda: None

    def upto(self, layer: int) -> None:
        raise PrefixLost("a stored layer is damaged")

    def close(self) -> None:
        pass


def served(runner: Counting, model: Model, *first: tuple[Any, Heard]) -> list[str]:
    """Texts of jobs that come together, those given and one for each prompt."""
    scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer)
    made = [*first, *(job(runner, ids, max_new_tokens=9) for ids in PROMPTS)]
    try:
        with scheduler._changed:  # the loop begins when all are there
            for one, _ in made:
                scheduler._queues.waiting.push(one)
            scheduler._changed.notify()
        for _, heard in made:
            heard.end()
    finally:
        scheduler.close()
        gc.collect()
    assert model.arena.used_bytes == 0
    return [heard.text for _, heard in made]


def test_jobs_that_wait_together_are_prefilled_together(model: Model) -> None:
    runner = Counting(model)
    assert served(runner, model) == [written(model, ids, 9) for ids in PROMPTS]
    assert max(runner.counts) > 1 and sum(runner.counts) == len(PROMPTS)


def test_an_idle_scheduler_waits_for_what_arrives_right_behind(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_GATHER_S", 1.0)  # so that a busy machine makes it, too
    runner = Counting(model)
    scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer)
    made = [job(runner, ids, max_new_tokens=2) for ids in PROMPTS[:2]]
    try:
        for one, _ in made:
            time.sleep(0.1)  # the loop has seen what was there
            scheduler.submit(one)
        for _, heard in made:
            heard.end()
    finally:
        scheduler.close()
        gc.collect()
    assert runner.counts == [2]


def test_an_idle_scheduler_waits_for_what_has_reached_the_server(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_GATHER_S", 0.0)
    runner = Counting(model)
    made = [job(runner, ids, max_new_tokens=2) for ids in PROMPTS[:4]]
    arriving = [one for one, _ in made[1:]]

    def settle(seconds: float) -> None:
        for one in arriving[:2]:  # the last one comes with the second call
            scheduler.submit(one)
        del arriving[:2]

    scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer, settle=settle)
    try:
        scheduler.submit(made[0][0])
        for _, heard in made:
            heard.end(timeout_s=60)
    finally:
        scheduler.close()
        gc.collect()
    assert runner.counts == [4]


def test_a_pass_on_a_cpu_has_at_most_a_chunk_of_tokens(model: Model) -> None:
    runner = Counting(model, chunk_len=64)
    short = [[index + 1] * 8 for index in range(20)]
    found = served(runner, model, *(job(runner, ids, max_new_tokens=9) for ids in short))
    assert found == [written(model, ids, 9) for ids in (*short, *PROMPTS)]
    assert 8 < max(runner.joined_lens) <= 64  # an eighth of a chunk joins, 40 and 33 run alone


def test_as_many_prompts_are_admitted_as_a_pass_takes(model: Model) -> None:
    runner = Counting(model, chunk_len=64)
    runner.pass_len = 128  # as on a GPU
    arriving = [job(runner, [index + 1] * 8, max_new_tokens=2) for index in range(20)]

    def settle(seconds: float) -> None:
        for one, _ in arriving[scheduler.num_waiting :]:
            scheduler.submit(one)

    scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer, settle=settle)
    try:
        scheduler.submit(arriving[0][0])
        for _, heard in arriving:
            heard.end(timeout_s=60)
    finally:
        scheduler.close()
        gc.collect()
    assert runner.counts[0] == 128 // 8


def test_a_job_whose_prefix_is_lost_restarts_alone(model: Model) -> None:
    runner, heard = Counting(model), Heard()
    source = Lossy(runner)
    bad, _ = job(runner, PROMPTS[1], max_new_tokens=9)
    bad.source, bad.listener = source, heard
    texts = served(runner, model, (bad, heard))
    assert texts == [written(model, ids, 9) for ids in (PROMPTS[1], *PROMPTS)]
    assert source.num_lost == 1


def test_prompts_that_do_not_fit_together_run_one_after_the_other(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, prefill = Counting(model), Counting.prefill

    def scarce(self: Counting, sequences: Sequence[SequenceCache], tokens: Any, **options: Any) -> Tensor:
        if len(sequences) > 1:
            raise OutOfPages("no pages for all of them")
        return prefill(self, sequences, tokens, **options)

    monkeypatch.setattr(Counting, "prefill", scarce)
    assert served(runner, model) == [written(model, ids, 9) for ids in PROMPTS]
    assert runner.counts == [1] * len(PROMPTS)


def test_a_listener_that_raises_fails_alone(model: Model) -> None:
    runner, heard = Counting(model), Heard()

    def deaf(event: Any) -> None:
        heard(event)
        if not heard.has_ended.is_set():
            raise ValueError("not now")

    bad, _ = job(runner, PROMPTS[0], max_new_tokens=9)
    bad.listener = deaf
    texts = served(runner, model, (bad, heard))
    assert texts[1:] == [written(model, ids, 9) for ids in PROMPTS]
    assert heard.end().reason == "failed"
