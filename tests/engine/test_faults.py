"""An exception at any call that the scheduler's loop makes fails one job at most; the others get their text.

A run is watched once: every call from the loop's own files into the package is a site. Then each site raises in turn,
in a run of its own. A site that later code adds is found without being listed here.
"""

from __future__ import annotations

import gc
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import Sampling
from kvfold.engine.scheduling import scheduler as scheduling
from kvfold.engine.scheduling.jobs import Ended, Event, SequenceStart
from kvfold.engine.scheduling.scheduler import Scheduler
from kvfold.errors import LogitsError, Overloaded
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from tests import tiny
from tests.engine.jobs import job

ROOT = Path(kvfold.__file__).parent
MANAGERS = tuple(
    f"scheduling/{name}" for name in ("scheduler", "queues", "admission", "prefill_manager", "decode_manager")
)
PARTS = (*MANAGERS, "scheduling/task", "scheduling/jobs")
PARTS += ("generate", "output_processor", "sampling", "runner", "forward")
LOOP = {str(ROOT / "engine" / f"{name}.py") for name in PARTS}
# The loop's own state, which nothing outside can make raise.
OWN = {str(ROOT / f"{name}.py") for name in ("pages/arena", *(f"engine/{name}" for name in MANAGERS))}
# What a whole batch has in common once its pass has run: numbers, and which tokens are the likeliest.
WHOLE = {"finish", "advance", "commit_run", "commit", "logical_len", "setup_s", "greedy_tokens", "_chosen"}
CAPACITY = 56 * 4096  # too little for both long replies


class Broken(Exception):
    pass


class Site(NamedTuple):
    caller: str
    callee: str
    file: str


MOVING = ("DecodeManager._preempt", "Admission.resume", "Task.preempt", "Task.resume")
Watch = Callable[[Site], None]


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Threads that start now tell of each call from the loop's files to another function of the package or the test's
    sources and listeners; what `watch` raises, the call raises."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name == "decorate_context":  # torch.inference_mode
            caller = caller.f_back
        if event != "call" or caller is None or caller.f_code.co_filename not in LOOP:
            return
        code = frame.f_code
        is_ours = code.co_filename.startswith((str(ROOT), str(Path(__file__).parent)))
        is_anonymous = code.co_name.startswith("<") or code.co_flags & inspect.CO_GENERATOR
        if not is_ours or is_anonymous or code.co_filename in OWN or code.co_name in WHOLE:
            return
        watch(Site(caller.f_code.co_qualname, code.co_qualname, Path(code.co_filename).name))

    threading.setprofile(profile)
    try:
        yield
    finally:
        threading.setprofile(None)


Options = dict[str, Any]
# Prompts of so many tokens: one that is read in pieces, a sampled one, one that stops at a text, one that only reads.
SHORT: dict[int, Options] = {
    29: {"max_new_tokens": 5},
    30: {"max_new_tokens": 4, "sampling": Sampling(0.8, seed=3)},
    9: {"max_new_tokens": 4, "stop": ["never written"]},
    33: {"max_new_tokens": 0, "cuts": (20,)},
}
LONG: dict[int, Options] = {40: {"max_new_tokens": 90}, 41: {"max_new_tokens": 80}}  # one of them moves to the host


class Ran(NamedTuple):
    ends: list[Ended]
    texts: list[str]
    scheduler: Scheduler


def still_scheduler(runner: Runner, model: Model) -> Scheduler:
    """Its clock stands still, so no time slice ends: batches are the same on a machine of any speed."""
    return Scheduler(runner, Policy.parse("full"), model.tokenizer, clock=lambda: 0.0)


def run_all(model: Model, asked: dict[int, Options]) -> Ran:
    """All jobs come in one turn, so that each run makes the same calls; the thread lives and no page is lost."""
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    scheduler = still_scheduler(runner, model)
    try:
        made = [job(runner, tiny.prompt(n, seed=n), **options) for n, options in asked.items()]
        with scheduler._changed:
            for one, _ in made:
                scheduler.submit(one)
        ends = [heard.end() for _, heard in made]
        assert scheduler.state == "running"
        assert not scheduler._supervisor.restarts, "the loop itself raised"
    finally:
        assert scheduler.close(60)
    gc.collect()
    assert model.arena.used_bytes == 0
    return Ran(ends, [heard.text for _, heard in made], scheduler)


@pytest.fixture(scope="module")
def small() -> Model:
    """After a run that compiles its kernels, which takes minutes while calls are watched."""
    found = tiny.ready("llama", capacity=CAPACITY)
    run_all(found, SHORT)
    return found


def sites_of(model: Model, asked: dict[int, Options]) -> tuple[Counter[Site], Ran]:
    sites: Counter[Site] = Counter()

    def count(site: Site) -> None:
        sites[site] += 1

    with watched(count):
        return sites, run_all(model, asked)


def test_an_exception_at_any_call_fails_one_job_at_most(small: Model) -> None:
    sites, normal = sites_of(small, SHORT)
    assert [end.reason for end in normal.ends] == ["length", "length", "length", "read"]
    phases = {"begin", "reached", "began", "prefill", "sample", "pick", "decode", "process", "end", "release"}
    assert phases | {"fits", "__call__"} <= _names(sites)
    for site, count in sites.items():
        if site.caller != "Job.end":  # a listener that raises then has nobody who would hear: tested below
            _inject(small, SHORT, normal, site, count // 2 + 1)


def test_an_exception_on_the_way_to_the_host_or_back_fails_one_job_at_most(small: Model) -> None:
    sites, normal = sites_of(small, LONG)
    assert normal.scheduler.num_preempted > 0
    moving = {site: count for site, count in sites.items() if count <= 2 and site.caller.startswith(MOVING)}
    assert {"can_preempt", "preempt", "snapshot_blocks", "resume", "restore_snapshot", "new_sequence"} <= _names(moving)
    for site in moving:
        _inject(small, LONG, normal, site, 1)


def _names(sites: Iterable[Site]) -> set[str]:
    return {site.callee.rpartition(".")[2] for site in sites}


def _inject(model: Model, asked: dict[int, Options], normal: Ran, site: Site, at: int) -> None:
    """One call raises: one job at most fails, with that error; all others have their text."""
    num_seen = 0

    def raise_at(here: Site) -> None:
        nonlocal num_seen
        num_seen += here == site
        if here == site and num_seen == at:
            raise Broken

    with watched(raise_at):
        ran = run_all(model, asked)
    assert num_seen >= at, f"{site} was not called {at} times"
    failed = 0
    for end, text, usual, whole in zip(ran.ends, ran.texts, normal.ends, normal.texts, strict=True):
        if end.reason == "failed":
            failed += 1
            assert isinstance(end.error, Broken), (site, at, end)
            assert whole.startswith(text), (site, at)
        else:
            assert (end, text) == (usual, whole), (site, at)
    assert failed <= 1, f"{site}, call {at}: {failed} jobs failed"


def test_a_listener_that_raises_at_its_end_is_its_own_fault(model: Model) -> None:
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer)
    told: list[Event] = []

    def listen(event: Event) -> None:
        told.append(event)
        if isinstance(event, Ended):
            raise Broken

    deaf, (other, heard) = (
        job(runner, tiny.prompt(9), max_new_tokens=2)[0],
        job(runner, tiny.prompt(8), max_new_tokens=9),
    )
    deaf.listener = listen
    scheduler.submit(deaf)
    scheduler.submit(other)
    assert heard.end().reason == "length"
    assert [event.reason for event in told if isinstance(event, Ended)] == ["length"]
    assert scheduler.state == "running"
    assert scheduler.close(60)


def test_of_a_batch_that_raises_only_whoever_is_at_fault_fails(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass raises whenever the third sequence is in it."""
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    decode = runner.decode
    bad: list[SequenceCache] = []
    sizes: list[int] = []

    def broken(sequences: Sequence[SequenceCache], *more: Any, **options: Any) -> Tensor:
        sizes.append(len(sequences))
        if bad and bad[0] in sequences:
            raise Broken
        return decode(sequences, *more, **options)

    def run(is_broken: bool) -> Sequence[tuple[str, str]]:
        scheduler = still_scheduler(runner, model)
        made = [job(runner, tiny.prompt(9, seed=i), max_new_tokens=6) for i in range(7)]
        victim, begin = made[2][0], made[2][0].source.begin

        def spoilt() -> SequenceStart:
            found = begin()
            bad.append(found.sequence)
            return found

        if is_broken:
            victim.source.begin = spoilt  # type: ignore[method-assign]
        with scheduler._changed:
            for one, _ in made:
                scheduler.submit(one)
        found = [(heard.end().reason, heard.text) for _, heard in made]
        assert scheduler.state == "running"
        assert scheduler.close(60)
        return found

    expected = run(False)
    monkeypatch.setattr(runner, "decode", broken)
    found = run(True)
    assert [reason for reason, _ in found] == ["length", "length", "failed", *["length"] * 4]
    assert [*found[:2], *found[3:]] == [*expected[:2], *expected[3:]]
    assert 1 in sizes and max(sizes) >= 4


def test_logits_of_one_request_that_are_not_finite_fail_it_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    decode = runner.decode

    def broken(sequences: Sequence[SequenceCache], *more: Any, **options: Any) -> Tensor:
        rows_BV = decode(sequences, *more, **options).clone()
        for row, sequence in enumerate(sequences):
            if sequence.logical_len == 14:
                rows_BV[row, 5] = torch.nan
        return rows_BV

    monkeypatch.setattr(runner, "decode", broken)
    scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer)
    made = [job(runner, tiny.prompt(n), max_new_tokens=4, sampling=Sampling(0.5)) for n in (20, 12, 30)]
    greedy = job(runner, tiny.prompt(13), max_new_tokens=4)
    for one, _ in (*made, greedy):
        scheduler.submit(one)
    assert [heard.end().reason for _, heard in (*made, greedy)] == ["length", "failed", "length", "failed"]
    assert all(isinstance(heard.end().error, LogitsError) for _, heard in (made[1], greedy))
    assert scheduler.close(60)


def test_a_loop_that_raises_fails_every_job_and_starts_anew(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer, max_running=1)
    seen: list[str] = []
    made = [job(runner, tiny.prompt(9, seed=i), max_new_tokens=100_000) for i in range(2)]
    for one, _ in made:
        scheduler.submit(one)
    assert made[0][1].has_written.wait(60)
    end_overdue = scheduler._end_overdue

    def broken() -> None:
        monkeypatch.setattr(scheduler, "_end_overdue", end_overdue)
        raise Broken

    def listen(event: Event) -> None:
        seen.append(scheduler.state)
        made[1][1](event)

    made[1][0].listener = listen
    monkeypatch.setattr(scheduler, "_end_overdue", broken)
    assert [type(heard.end().error) for _, heard in made] == [Broken, Broken]
    assert seen == ["restarting"]
    after, heard = job(runner, tiny.prompt(9), max_new_tokens=3)
    scheduler.submit(after)
    assert heard.end().reason == "length"
    assert scheduler.state == "running"
    assert scheduler.close(60)


def test_a_loop_that_keeps_raising_is_over(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "RESTART_DELAY_S", 0.0)
    told = threading.Event()
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer, on_failure=told.set)

    def broken() -> None:
        raise Broken

    monkeypatch.setattr(scheduler, "_end_overdue", broken)
    for _ in range(scheduling.MAX_RESTARTS + 1):
        assert not told.is_set()
        one, heard = job(runner, tiny.prompt(9))
        scheduler.submit(one)
        assert isinstance(heard.end().error, Broken)
    assert told.wait(60)
    assert scheduler.state == "failed"
    with pytest.raises(Overloaded, match="has failed"):
        scheduler.submit(job(runner, tiny.prompt(9))[0])
    assert scheduler.close(60)
