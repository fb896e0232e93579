"""An exception at any call that the scheduler's loop makes fails one job at most; the others get their text.

A run is watched once: every call from the loop's own files into the package is a site. Then each site raises in turn,
in a run of its own. A site that later code adds is found without being listed here.
"""

from __future__ import annotations

import gc
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import kvfold
from kvfold.engine.jobs import Ended
from kvfold.engine.runner import Runner
from kvfold.engine.sample import Sampling
from kvfold.engine.scheduler import Scheduler
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from tests import tiny
from tests.engine.jobs import job

ROOT = Path(kvfold.__file__).parent
PARTS = ("scheduler", "task", "generate", "writer", "sample", "runner", "jobs")
LOOP = {str(ROOT / "engine" / f"{name}.py") for name in PARTS}
OWN = {str(ROOT / "engine" / f"{name}.py") for name in ("scheduler", "lines")}  # the loop's own state
COUNTING = {"finish", "advance", "commit_run", "commit", "logical_len", "setup_s"}  # numbers of a whole batch, no more
CAPACITY = 56 * 4096  # too little for both long replies


class Broken(Exception):
    pass


class Site(NamedTuple):
    caller: str
    callee: str
    file: str


MOVING = ("Scheduler._demote", "Scheduler._come_back", "Task.leave", "Task.come_back")
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
        if not is_ours or is_anonymous or code.co_filename in OWN or code.co_name in COUNTING:
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
    29: {"max_new_tokens": 9},
    30: {"max_new_tokens": 8, "sampling": Sampling(0.8, seed=3)},
    9: {"max_new_tokens": 7, "stop": ["never written"]},
    33: {"max_new_tokens": 0, "cuts": (20,)},
}
LONG: dict[int, Options] = {40: {"max_new_tokens": 90}, 41: {"max_new_tokens": 80}}  # one of them moves to the host


class Ran(NamedTuple):
    ends: list[Ended]
    texts: list[str]
    scheduler: Scheduler


def run_all(model: Model, asked: dict[int, Options]) -> Ran:
    """All jobs come in one turn, so that each run makes the same calls; the thread lives and no page is lost."""
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=16)
    scheduler = Scheduler(runner, Policy.parse("full"), model.tokenizer)
    try:
        made = [job(runner, tiny.prompt(n, seed=n), **options) for n, options in asked.items()]
        with scheduler._changed:
            for one, _ in made:
                scheduler.submit(one)
        ends = [heard.end() for _, heard in made]
        assert scheduler.state == "running"
        assert not scheduler._restarts, "the loop itself raised"
    finally:
        assert scheduler.close(60)
    gc.collect()
    assert model.arena.lent_bytes == 0
    return Ran(ends, [heard.text for _, heard in made], scheduler)


@pytest.fixture(scope="module")
def small() -> Model:
    return tiny.ready("llama", capacity=CAPACITY)


def sites_of(model: Model, asked: dict[int, Options]) -> tuple[Counter[Site], Ran]:
    sites: Counter[Site] = Counter()

    def count(site: Site) -> None:
        sites[site] += 1

    with watched(count):
        return sites, run_all(model, asked)


def test_an_exception_at_any_call_fails_one_job_at_most(small: Model) -> None:
    sites, normal = sites_of(small, SHORT)
    assert [end.reason for end in normal.ends] == ["length", "length", "length", "read"]
    phases = {"begin", "reached", "began", "read", "prefill", "write", "pick", "decode", "ran", "end", "release"}
    assert phases | {"fits", "__call__"} <= _names(sites)
    for site, count in sites.items():
        _inject(small, SHORT, normal, site, count // 2 + 1)


def test_an_exception_on_the_way_to_the_host_or_back_fails_one_job_at_most(small: Model) -> None:
    sites, normal = sites_of(small, LONG)
    assert normal.scheduler.num_demoted > 0
    moving = {site: count for site, count in sites.items() if count <= 2 and site.caller.startswith(MOVING)}
    assert {"can_leave", "leave", "take", "come_back", "put_back", "new_sequence"} <= _names(moving)
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
