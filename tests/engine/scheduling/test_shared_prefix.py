"""Jobs in flight that share a prefix: it is computed once, replies are those of single runs, nobody waits in vain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.jobs import Job, PrefillDone, PrefixSharing
from kvfold.engine.scheduling.scheduler import Scheduler
from kvfold.engine.scheduling.shared_prefix import shared_len, start_of, waits_for
from kvfold.engine.scheduling.task import Task
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.store.key import PAGE_LEN
from tests import tiny
from tests.engine.jobs import Heard, job
from tests.engine.scheduling.test_scheduler import alone, scheduling
from tests.engine.test_fairness import Parts, parts

__all__ = ["parts"]

PREFIX = tiny.prompt(100, seed=7)
ONE = PrefixSharing("one")


def prompts(num: int, num_own: int = 9) -> list[list[int]]:
    return [[*PREFIX, *tiny.prompt(num_own, seed=100 + i)] for i in range(num)]


def submit_at_once(scheduler: Scheduler, jobs: Sequence[Job]) -> None:
    """None is admitted before all wait."""
    with scheduler._queues.changed:
        for one in jobs:
            scheduler.submit(one)


def num_reused(heard: Heard) -> int:
    (found,) = (event.num_reused for event in heard.events if isinstance(event, PrefillDone))
    return found


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each prefill that has ended."""
    found, prefill = list[int](), Runner.prefill

    def counted(self: Runner, sequences: Any, tokens: Any, **options: Any) -> Any:
        result = prefill(self, sequences, tokens, **options)
        found.append(sum(map(len, tokens)))
        return result

    monkeypatch.setattr(Runner, "prefill", counted)
    yield found


@pytest.mark.parametrize("slice_s", [0.0, 60.0])
def test_a_new_prefix_of_jobs_that_come_at_once_is_computed_once(
    model: Model, computed: list[int], slice_s: float
) -> None:
    made_of = prompts(6)
    expected = [alone(model, ids, "full", 8) for ids in made_of]
    computed.clear()
    with scheduling(model, slice_s=slice_s) as scheduler:
        made = [job(scheduler.runner, ids, max_new_tokens=8, sharing=ONE) for ids in made_of]
        submit_at_once(scheduler, [one for one, _ in made])
        assert [heard.end().reason for _, heard in made] == ["length"] * 6
    shared = len(PREFIX) - len(PREFIX) % PAGE_LEN
    assert [num_reused(heard) for _, heard in made] == [0] + [shared] * 5
    assert sum(computed) == sum(map(len, made_of)) - 5 * shared
    assert [heard.text for _, heard in made] == expected


def test_a_reply_that_is_written_shares_its_prompt(model: Model) -> None:
    with scheduling(model) as scheduler:
        first, writing = job(scheduler.runner, PREFIX, max_new_tokens=10_000, sharing=ONE)
        scheduler.submit(first)
        assert writing.has_written.wait(60)
        second, heard = job(scheduler.runner, PREFIX, max_new_tokens=8, sharing=ONE)
        scheduler.submit(second)
        assert heard.end().reason == "length" and not writing.has_ended.is_set()
    assert num_reused(heard) == 96
    assert heard.text == alone(model, PREFIX, "full", 8)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_if_the_first_ends_the_next_one_computes_the_prefix(model: Model, parts: Parts, how: str) -> None:
    def fail() -> None:
        raise InputError("a part fails")

    made_of = prompts(4)
    expected = [alone(model, ids, "full", 8) for ids in made_of]
    parts.log.clear()
    with scheduling(model, slice_s=0.0) as scheduler:
        made = [job(scheduler.runner, ids, max_new_tokens=8, sharing=ONE) for ids in made_of]
        parts.at[3 * model.spec.num_layers] = partial(scheduler.cancel, made[0][0]) if how == "cancelled" else fail
        submit_at_once(scheduler, [one for one, _ in made])
        assert [heard.end().reason for _, heard in made] == [how] + ["length"] * 3
    assert [num_reused(heard) for _, heard in made[1:]] == [0, 96, 96]
    assert [heard.text for _, heard in made[1:]] == expected[1:]


def test_scopes_share_nothing(model: Model, computed: list[int]) -> None:
    made_of = prompts(4)
    sharing = [ONE, PrefixSharing("two"), None, None]
    with scheduling(model) as scheduler:
        made = [
            job(scheduler.runner, ids, max_new_tokens=1, sharing=mine)
            for ids, mine in zip(made_of, sharing, strict=True)
        ]
        submit_at_once(scheduler, [one for one, _ in made])
        assert all(heard.end().reason == "length" for _, heard in made)
    assert sum(computed) == sum(map(len, made_of))


def test_a_waiting_tenant_lets_others_pass(model: Model, parts: Parts) -> None:
    """Three of one tenant wait for their first one; another tenant's prompt does not."""
    order: list[str] = []
    with scheduling(model, slice_s=0.0) as scheduler:
        made = [job(scheduler.runner, ids, max_new_tokens=1, tenant="a", sharing=ONE) for ids in prompts(4)]
        made.append(job(scheduler.runner, tiny.prompt(20), max_new_tokens=1, tenant="b", sharing=PrefixSharing("b")))
        for one, heard in made:
            one.listener = partial(_note, order, one.tenant, heard)
        submit_at_once(scheduler, [one for one, _ in made])
        assert all(heard.end().reason == "length" for _, heard in made)
    assert order == ["b", "a", "a", "a", "a"]


def _note(order: list[str], name: str, heard: Heard, event: Any) -> None:
    if isinstance(event, PrefillDone):
        order.append(name)
    heard(event)


def test_replies_that_share_and_are_preempted_are_the_same(computed: list[int]) -> None:
    small = tiny.ready("llama", capacity=110 * 4096)
    made_of = [[*PREFIX[:48], *tiny.prompt(5, seed=20 + i)] for i in range(4)]
    expected = [alone(small, ids, "full", 150) for ids in made_of]
    computed.clear()
    with scheduling(small) as scheduler:
        made = [job(scheduler.runner, ids, max_new_tokens=150, sharing=ONE) for ids in made_of]
        submit_at_once(scheduler, [one for one, _ in made])
        assert [heard.end().reason for _, heard in made] == ["length"] * 4
        assert scheduler.num_preempted > 0
    assert sum(computed) < sum(map(len, made_of))
    assert [heard.text for _, heard in made] == expected


def task_of(model: Model, tokens: Sequence[int], done: int, sharing: PrefixSharing = ONE) -> Task:
    """A task that is prefilled up to `done`."""
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    found = Task(job(runner, tokens, sharing=sharing)[0], runner, model.tokenizer, in_chunks=True)
    if done:
        runner.prefill([found.sequence], [tokens[:done]])
    return found


@pytest.mark.parametrize(
    ("num_same", "done", "chunk_len", "expected"),
    [
        (100, 0, 16, True),
        (100, 80, 16, True),
        (100, 96, 16, False),  # the whole pages of it are there
        (100, 0, 64, True),
        (100, 64, 64, True),  # 32 tokens of 45 that are left
        (20, 0, 16, True),
        (15, 0, 16, False),  # less than a page
        (40, 0, 64, True),  # half of the chunk
        (30, 0, 64, False),  # 16 tokens of a chunk of 64
        (30, 0, 512, False),
    ],
)
def test_a_job_waits_if_half_of_what_it_waits_for_is_its_own(
    model: Model, num_same: int, done: int, chunk_len: int, expected: bool
) -> None:
    tokens = tiny.prompt(109, seed=7)
    task = task_of(model, tokens, done)
    other, _ = job(task._runner, [*tokens[:num_same], *((token + 1) % 90 for token in tokens[num_same:])], sharing=ONE)
    other.number = 1
    assert shared_len(other, task.job) == (num_same if num_same >= 16 else 0)
    assert waits_for(other, task, chunk_len) is expected
    assert not waits_for(other, task, chunk_len, 8192), "a pass over both takes as long"
    other.number = 0
    assert not waits_for(other, task, chunk_len), "it was submitted first"
    other.number, task.blocked_at = 1, 0
    assert not waits_for(other, task, chunk_len), "the task itself waits for pages"
    task.end("cancelled")


def test_compressed_prefixes_are_shared_where_both_are_compressed_and_saved(model: Model) -> None:
    tokens = tiny.prompt(109, seed=7)
    task = task_of(model, tokens, 0, PrefixSharing("one", [(40, 80)]))
    for saved, same, expected in (
        ([(40, 80)], 90, True),
        ([(40,), (40, 80)], 90, True),
        ([(40, 80)], 79, False),  # it differs before
        ([(80,)], 90, False),  # it is compressed elsewhere
        ([(40,)], 90, False),  # the task saves nothing there
        ([], 90, False),
    ):
        ids = [*tokens[:same], *((token + 1) % 90 for token in tokens[same:])]
        other, _ = job(task._runner, ids, sharing=PrefixSharing("one", saved))
        other.number = 1
        assert waits_for(other, task, 16) is expected
        start = start_of(other, [task])
        assert start.num_read == 0, "only the source reads what was saved"
        start.sequence.release()
    task.end("cancelled")


@pytest.mark.parametrize(("cuts", "expected"), [(None, 96), ([70], 96), ([90], 90), ([99], 99), ([70, 85, 101], 85)])
def test_what_is_copied_ends_at_a_page_or_at_a_cut(model: Model, cuts: list[int] | None, expected: int) -> None:
    """So equal prompts that stop at a cut run the same shapes, and end in the same logits."""
    tokens = tiny.prompt(100, seed=7)
    task = task_of(model, tokens, 100)
    start = start_of(job(task._runner, tokens, cuts=cuts, sharing=ONE)[0], [task])
    assert start.num_read == start.sequence.committed_len == expected
    start.sequence.release()
    task.end("cancelled")
    start = start_of(job(task._runner, tokens, sharing=ONE)[0], [task])
    start.sequence.release()
    assert start.num_read == 0, "the task holds nothing any more"
