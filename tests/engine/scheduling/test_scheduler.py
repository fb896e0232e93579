"""The scheduler: replies are those of single runs, whoever else runs; nobody starves; no page outlives its job."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise
from threading import Event as Flag
from typing import Any

import pytest
import torch

from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import Sampling
from kvfold.engine.scheduling.jobs import Ended, Event, Job, PrefillDone, SequenceStart, TextDelta
from kvfold.engine.scheduling.scheduler import Scheduler
from kvfold.engine.scheduling.task import Task
from kvfold.errors import InputError, OutOfPages, Overloaded
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from tests import tiny
from tests.engine.jobs import Fresh, Heard, job


@contextmanager
def scheduling(model: Model, policy: str = "full", *, chunk_len: int = 16, **options: Any) -> Iterator[Scheduler]:
    """A scheduler whose model has all its pages back at the end."""
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=chunk_len)
    scheduler = Scheduler(runner, Policy.parse(policy), model.tokenizer, **options)
    try:
        yield scheduler
    finally:
        scheduler.close()
        gc.collect()
        assert model.arena.used_bytes == 0


def alone(model: Model, tokens: list[int], policy: str, num_new: int, **options: Any) -> str:
    """What a single run writes."""
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    sequence = runner.new_sequence(Policy.parse(policy))
    request = Request(sequence, runner.prefill([sequence], [tokens])[0], num_new, **options)
    text = "".join(piece for _, piece in generate(runner, [request], model.tokenizer))
    sequence.release()
    return text


PROMPTS = [tiny.prompt(length, seed=length) for length in (5, 70, 33, 120, 16)]


@pytest.mark.parametrize("policy", ["full", "keydiff + 80tok", "int4"])
def test_replies_are_those_of_single_runs(model: Model, policy: str) -> None:
    options = [{"sampling": Sampling(temperature=0.8 * (i % 2), seed=i)} for i in range(len(PROMPTS))]
    expected = [alone(model, ids, policy, 20 + 3 * i, **options[i]) for i, ids in enumerate(PROMPTS)]
    with scheduling(model, policy) as scheduler:
        made = [
            job(scheduler.runner, ids, policy, max_new_tokens=20 + 3 * i, tenant=str(i % 2), **options[i])
            for i, ids in enumerate(PROMPTS)
        ]
        for one, _ in made:
            scheduler.submit(one)
        ends = [heard.end() for _, heard in made]
    assert [heard.text for _, heard in made] == expected
    assert [(end.reason, end.num_tokens) for end in ends] == [("length", 20 + 3 * i) for i in range(len(PROMPTS))]


def test_replies_that_move_to_the_host_are_the_same() -> None:
    small = tiny.ready("llama", capacity=100 * 4096)
    prompts = [tiny.prompt(40, seed=i) for i in range(4)]
    expected = [alone(small, ids, "full", 150) for ids in prompts]
    with scheduling(small) as scheduler:
        made = [job(scheduler.runner, ids, max_new_tokens=150) for ids in prompts]
        for one, _ in made:
            scheduler.submit(one)
        assert [heard.end().reason for _, heard in made] == ["length"] * 4
        assert scheduler.num_preempted > 0
    assert [heard.text for _, heard in made] == expected


def test_a_tenant_whose_replies_fill_the_arena_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies of one are preempted again and again. A reply of another waits for no more than the end of one of them,
    and is not preempted."""
    small = tiny.ready("llama", capacity=100 * 4096)
    expected = alone(small, tiny.prompt(40, seed=9), "full", 150)
    order: list[str] = []  # ends of one, preemptions of all, and when the other begins
    preempt = Task.preempt

    def noted(task: Task) -> None:
        order.append(f"preempt {task.tenant}")
        preempt(task)

    monkeypatch.setattr(Task, "preempt", noted)
    with scheduling(small) as scheduler:
        many = [
            job(scheduler.runner, tiny.prompt(40, seed=i), max_new_tokens=300 + 60 * i, tenant="a") for i in range(9)
        ]
        one, heard_one = job(scheduler.runner, tiny.prompt(40, seed=9), max_new_tokens=150, tenant="b")

        def submit_when_full() -> None:
            if scheduler.num_preempted and "submit b" not in order:
                order.append("submit b")
                scheduler.submit(one)

        for each, heard in many:
            each.listener = _on(Ended, partial(order.append, "end a"), _on(TextDelta, submit_when_full, heard))
        one.listener = _on(PrefillDone, partial(order.append, "begin b"), heard_one)
        for each, _ in many:
            scheduler.submit(each)
        assert all(heard.end().reason == "length" for _, heard in [*many, (one, heard_one)])
    waited = order[order.index("submit b") : order.index("begin b")]
    assert waited.count("end a") <= 1
    assert "preempt a" in order[order.index("begin b") :] and "preempt b" not in order
    assert heard_one.text == expected


def test_a_prompt_is_read_in_pieces_between_steps_of_others(model: Model) -> None:
    with scheduling(model) as scheduler:
        first, writing = job(scheduler.runner, tiny.prompt(4), max_new_tokens=400)
        scheduler.submit(first)
        assert writing.has_written.wait(60)
        second, reading = job(scheduler.runner, tiny.prompt(160), max_new_tokens=1)
        before = len(writing.events)
        scheduler.submit(second)
        assert reading.has_begun.wait(60)
        assert len(writing.events) - before >= 8, "160 tokens are ten pieces, and the other one writes between them"
        scheduler.cancel(first)
        assert writing.end().reason == "cancelled"


@pytest.mark.parametrize(("length", "between"), [(2, [0, 0, 0]), (10, [1, 1, 1])])
def test_a_step_waits_for_no_more_than_a_chunk(model: Model, length: int, between: list[int]) -> None:
    """Chunks have 16 tokens: prompts of two are read in one turn, of those of ten one in each."""
    with scheduling(model, slice_s=60.0) as scheduler:
        first, writing = job(scheduler.runner, tiny.prompt(4), max_new_tokens=400)
        made = [job(scheduler.runner, tiny.prompt(length, seed=i), max_new_tokens=1) for i in range(4)]
        written: list[int] = []  # by the first, when each of the others begins
        for one, heard in made:
            one.listener = _on(PrefillDone, lambda: written.append(len(writing.events)), heard)
        first.listener = _on(TextDelta, _asking(scheduler, made), writing)  # between two turns, so all come at once
        scheduler.submit(first)
        assert [heard.end().reason for _, heard in made] == ["length"] * 4
    assert [later - earlier for earlier, later in pairwise(written)] == between


def test_few_prompts_are_read_at_a_time(model: Model) -> None:
    """The others hold nothing yet and may find what these leave in a store."""
    waiting: list[int] = []
    with scheduling(model, slice_s=60.0) as scheduler:
        made = [job(scheduler.runner, tiny.prompt(60, seed=i), max_new_tokens=1) for i in range(7)]
        first, heard_first = job(scheduler.runner, tiny.prompt(4), max_new_tokens=400)
        for one, heard in made:
            one.listener = _on(PrefillDone, lambda: waiting.append(scheduler.num_waiting), heard)
        first.listener = _on(TextDelta, _asking(scheduler, made), heard_first)
        scheduler.submit(first)
        assert [heard.end().reason for _, heard in made] == ["length"] * 7
    assert waiting[0] == 4, "of four places to read one is kept for a short prompt"


def test_texts_that_are_not_taken_come_as_one_before_the_end(model: Model) -> None:
    expected = alone(model, tiny.prompt(9), "full", 30)
    with scheduling(model, takes_texts=lambda: False) as scheduler:
        one, heard = job(scheduler.runner, tiny.prompt(9), max_new_tokens=30)
        scheduler.submit(one)
        assert heard.end().num_tokens == 30
    assert heard.events == [PrefillDone(0), TextDelta(expected), Ended("length", 30)]


def test_texts_wait_no_longer_than_they_are_not_taken(model: Model) -> None:
    """Every other time they are taken, also while only one token is left to sample."""
    turns = count()
    with scheduling(model, takes_texts=lambda: next(turns) % 2 == 0) as scheduler:
        one, heard = job(scheduler.runner, tiny.prompt(9), max_new_tokens=40)
        scheduler.submit(one)
        assert heard.end().num_tokens == 40
    assert heard.text == alone(model, tiny.prompt(9), "full", 40)
    assert sum(isinstance(event, TextDelta) for event in heard.events) > 10


def test_texts_that_were_not_taken_are_told_before_an_early_end(model: Model) -> None:
    with scheduling(model, takes_texts=lambda: False) as scheduler:
        one, heard = job(scheduler.runner, tiny.prompt(9), max_new_tokens=400)
        scheduler.submit(one)
        assert heard.has_begun.wait(60)
        while not (decoding := list(scheduler._queues.decoding)) or not decoding[0].output.request.text:
            time.sleep(0.001)
        scheduler.cancel(one)
        assert heard.end().reason == "cancelled"
    assert heard.text == decoding[0].output.request.text


def test_cuts_are_told_and_compress(model: Model) -> None:
    tokens = tiny.prompt(100)
    with scheduling(model, "keydiff + 4x") as scheduler:
        one, heard = job(scheduler.runner, tokens, "keydiff + 4x", max_new_tokens=0, cuts=(40, 90))
        scheduler.submit(one)
        assert heard.end() == Ended("read")
    assert isinstance(one.source, Fresh)
    assert one.source.lens == [40, 90, 100, 0]
    assert heard.events[0] == PrefillDone(0)


def test_a_prompt_too_short_for_the_size_is_kept_whole(model: Model) -> None:
    tokens = tiny.prompt(90)
    with scheduling(model, "keydiff + 4x") as scheduler:
        one, heard = job(scheduler.runner, tokens, "keydiff + 4x", max_new_tokens=12)
        scheduler.submit(one)
        assert heard.end().reason == "length"
    assert heard.text == alone(model, tokens, "full", 12)


def test_a_stop_string_is_named(model: Model) -> None:
    tokens = tiny.prompt(30)
    text = alone(model, tokens, "full", 40)
    stop = text[10:13]
    with scheduling(model) as scheduler:
        one, heard = job(scheduler.runner, tokens, max_new_tokens=40, stop=["never seen", stop])
        scheduler.submit(one)
        assert (heard.end().reason, heard.end().stop) == ("stop", stop)
    assert heard.text == text[: text.index(stop)]


@pytest.mark.parametrize("when", ["waiting", "writing"])
def test_late_and_cancelled_jobs_give_everything_back(model: Model, when: str) -> None:
    now = [0.0]
    with scheduling(model, clock=lambda: now[0], max_running=1 if when == "waiting" else 4) as scheduler:
        first, busy = job(scheduler.runner, tiny.prompt(9), max_new_tokens=100_000)
        scheduler.submit(first)
        assert busy.has_written.wait(60)
        late, heard_late = job(scheduler.runner, tiny.prompt(30), max_new_tokens=100_000, deadline=5.0)
        gone, heard_gone = job(scheduler.runner, tiny.prompt(20), max_new_tokens=100_000)
        scheduler.submit(late)
        scheduler.submit(gone)
        if when == "writing":
            assert heard_late.has_written.wait(60) and heard_gone.has_written.wait(60)
        scheduler.cancel(gone)
        assert heard_gone.end().reason == "cancelled"
        now[0] = 5.0
        assert heard_late.end().reason == "late"
        assert not busy.has_ended.is_set()
    assert busy.end().reason == "cancelled"  # by the close


def test_a_burst_of_one_tenant_does_not_hold_up_another(model: Model) -> None:
    with scheduling(model, max_running=1) as scheduler:
        first, busy = job(scheduler.runner, tiny.prompt(9), max_new_tokens=100_000, tenant="a")
        scheduler.submit(first)
        assert busy.has_written.wait(60)
        order: list[str] = []
        made = []
        for tenant in ("a", "a", "a", "b"):
            one, heard = job(scheduler.runner, tiny.prompt(5), max_new_tokens=1, tenant=tenant)
            one.listener = _on(PrefillDone, partial(order.append, tenant), heard)
            made.append(heard)
            scheduler.submit(one)
        scheduler.cancel(first)
        assert all(heard.end().reason == "length" for heard in made)
    assert order.index("b") < 2


def _asking(scheduler: Scheduler, made: Sequence[tuple[Job, Heard]]) -> Callable[[], None]:
    """Submits all jobs when it is called first."""
    left = [one for one, _ in made]

    def ask() -> None:
        while left:
            scheduler.submit(left.pop(0))

    return ask


def _on(kind: type[Event], act: Callable[[], object], then: Callable[[Event], None]) -> Callable[[Event], None]:
    """A listener that acts before another one hears of events of a kind."""

    def listen(event: Event) -> None:
        if isinstance(event, kind):
            act()
        then(event)

    return listen


def test_too_many_are_refused_at_once(model: Model) -> None:
    with scheduling(model, max_running=1, max_waiting=1) as scheduler:
        first, busy = job(scheduler.runner, tiny.prompt(9), max_new_tokens=100_000)
        scheduler.submit(first)
        assert busy.has_written.wait(60)
        scheduler.submit(job(scheduler.runner, tiny.prompt(9))[0])
        with pytest.raises(Overloaded, match="the queue has 1 request; try again later"):
            scheduler.submit(job(scheduler.runner, tiny.prompt(9))[0])


def test_an_idle_scheduler_takes_all_for_which_there_are_places(model: Model) -> None:
    begins = Flag()

    class Late(Fresh):
        def begin(self) -> SequenceStart:
            begins.wait(60)
            return super().begin()

    with scheduling(model, max_running=3, max_waiting=2) as scheduler:
        made = [job(scheduler.runner, tiny.prompt(9, seed=seed), max_new_tokens=1) for seed in range(5)]
        made[0][0].source = Late(scheduler.runner)
        try:
            for one, _ in made:
                scheduler.submit(one)
            with pytest.raises(Overloaded, match="the queue has 5 requests"):
                scheduler.submit(job(scheduler.runner, tiny.prompt(9))[0])
        finally:
            begins.set()
        assert {heard.end().reason for _, heard in made} == {"length"}


def test_a_prompt_that_never_fits_fails_alone() -> None:
    small = tiny.ready("llama", capacity=60 * 4096)
    with scheduling(small) as scheduler:
        huge, refused = job(scheduler.runner, tiny.prompt(900))
        fine, served = job(scheduler.runner, tiny.prompt(9), max_new_tokens=3)
        scheduler.submit(huge)
        scheduler.submit(fine)
        assert isinstance(refused.end().error, OutOfPages)
        assert served.end().reason == "length"


def test_an_error_in_one_source_is_that_job_s_alone(model: Model) -> None:
    with scheduling(model) as scheduler:
        bad, heard = job(scheduler.runner, [tiny.VOCAB_SIZE + 7], max_new_tokens=3)
        fine, served = job(scheduler.runner, tiny.prompt(9), max_new_tokens=3)
        scheduler.submit(bad)
        scheduler.submit(fine)
        assert isinstance(heard.end().error, InputError)
        assert served.end().reason == "length"


def test_what_is_held_for_later_gives_way() -> None:
    small = tiny.ready("llama", capacity=60 * 4096)
    held = [Runner(small.hf, small.spec, small.arena).new_sequence(Policy.parse("full"))]
    Runner(small.hf, small.spec, small.arena).prefill(held, [tiny.prompt(200)])

    def evict_idle() -> bool:
        if held:
            held.pop().release()
            return True
        return False

    with scheduling(small, evict_idle=evict_idle) as scheduler:
        one, heard = job(scheduler.runner, tiny.prompt(200), max_new_tokens=3)
        scheduler.submit(one)
        assert heard.end().reason == "length"
    assert not held


def test_bad_bounds_are_refused(model: Model) -> None:
    runner = Runner(model.hf, model.spec, model.arena)
    with pytest.raises(InputError, match="max_running is 0"):
        Scheduler(runner, Policy.parse("full"), model.tokenizer, max_running=0)
    with pytest.raises(InputError, match="holds no tokens"):
        job(runner, [])
    assert torch.is_grad_enabled()
