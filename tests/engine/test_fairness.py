"""Nobody waits for the whole of another's prompt: replies step between its layers, tenants share places and time.

Time slices have no length here, so a prompt that is not alone pauses at every yield point. A part is what lies between
two of them: a layer over a piece of the prompt. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, groupby
from typing import Any

import pytest

from kvfold.engine.resumable import Resumable
from kvfold.engine.runner import Runner
from kvfold.engine.scheduling import task as task_module
from kvfold.engine.scheduling.jobs import Event, Job, PrefillDone
from kvfold.errors import InputError
from kvfold.models import pass_cache
from kvfold.models.loader import Model
from kvfold.yielding import yield_point
from tests import tiny
from tests.engine.jobs import Heard, job
from tests.engine.scheduling.test_scheduler import alone, scheduling

LONG = tiny.prompt(140, seed=3)
POLICIES = (
    "full",
    "keydiff + 80tok",
    "kvzip(chunk=64) + global + 2x + int4",
    "knorm + 80tok + between_chunks(chunk=32)",
)


class Parts:
    """Parts and decode steps in the order they ran; `at` acts when so many parts have begun."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.at: dict[int, Callable[[], object]] = {}

    @property
    def num(self) -> int:
        return self.log.count("part")

    def part(self, **options: Any) -> None:
        self.log.append("part")
        self.at.get(self.num, lambda: None)()
        self.yield_point(**options)

    def step(self, decode: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.log.append("step")
        return decode(*args, **options)

    yield_point = staticmethod(yield_point)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    found, decode = Parts(), Runner.decode
    monkeypatch.setattr(pass_cache, "yield_point", found.part)
    monkeypatch.setattr(Runner, "decode", lambda *args, **options: found.step(decode, *args, **options))
    yield found


def noting(order: list[str], name: str, one: Job, heard: Heard) -> None:
    """Let a job note its name when it begins to reply."""

    def listen(event: Event) -> None:
        if isinstance(event, PrefillDone):
            order.append(name)
        heard(event)

    one.listener = listen


@pytest.mark.parametrize("policy", POLICIES)
def test_replies_step_between_the_layers_of_a_prompt(model: Model, parts: Parts, policy: str) -> None:
    expected = alone(model, LONG, policy, 9)
    parts.log.clear()
    with scheduling(model, policy, slice_s=0.0) as scheduler:
        stream, writing = job(scheduler.runner, tiny.prompt(9), policy, max_new_tokens=900)
        scheduler.submit(stream)
        assert writing.has_written.wait(60)
        begun = len(parts.log)
        one, heard = job(scheduler.runner, LONG, policy, max_new_tokens=9)
        scheduler.submit(one)
        assert heard.end().reason == "length"
        log = parts.log[begun:]
        scheduler.cancel(stream)
        text = writing.text
        assert writing.end().reason == "cancelled"
    assert heard.text == expected
    assert alone(model, tiny.prompt(9), policy, 1 + parts.log.count("step")).startswith(text)
    assert log.count("part") >= 9 * model.spec.num_layers, "140 tokens are 9 pieces"
    assert max(len(list(run)) for kind, run in groupby(log) if kind == "part") == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_prompt_does_not_wait_for_a_long_one(model: Model, parts: Parts, policy: str) -> None:
    order: list[str] = []
    with scheduling(model, policy, slice_s=0.0) as scheduler:
        long, heard_long = job(scheduler.runner, LONG, policy, max_new_tokens=3)
        short, heard_short = job(scheduler.runner, tiny.prompt(9), policy, max_new_tokens=1)
        noting(order, "long", long, heard_long)
        noting(order, "short", short, heard_short)
        parts.at[5] = partial(scheduler.submit, short)
        scheduler.submit(long)
        assert heard_long.end().reason == heard_short.end().reason == "length"
    assert order == ["short", "long"]


@pytest.mark.parametrize("policy", POLICIES[1:3])
def test_a_prompt_that_is_alone_is_read_in_one_go(model: Model, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    resumed: list[int] = []

    class Counted(Resumable[Any]):
        def resume(self) -> bool:
            resumed.append(1)
            return super().resume()

    monkeypatch.setattr(task_module, "Resumable", Counted)
    with scheduling(model, policy, slice_s=0.0) as scheduler:
        one, heard = job(scheduler.runner, LONG, policy, max_new_tokens=3)
        scheduler.submit(one)
        assert heard.end().reason == "length"
    assert len(resumed) == 1


@pytest.mark.parametrize("how", ["cancelled", "late", "failed", "closed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_ends_in_the_middle_leaves_nothing(model: Model, parts: Parts, policy: str, how: str) -> None:
    now = [0.0]

    def fail() -> None:
        raise InputError("a part fails")

    with scheduling(model, policy, slice_s=0.0, clock=lambda: now[0]) as scheduler:
        stream, writing = job(scheduler.runner, tiny.prompt(9), policy, max_new_tokens=900)
        scheduler.submit(stream)
        assert writing.has_written.wait(60)
        one, heard = job(scheduler.runner, LONG, policy, max_new_tokens=9, deadline=5.0)
        acts: dict[str, Callable[[], object]] = {
            "cancelled": partial(scheduler.cancel, one),
            "late": partial(now.__setitem__, 0, 5.0),
            "failed": fail,
            "closed": partial(setattr, scheduler._supervisor, "is_closed", True),
        }
        parts.at[parts.num + 2 * model.spec.num_layers + 8] = acts[how]
        scheduler.submit(one)
        assert heard.end().reason == ("cancelled" if how == "closed" else how)
        assert not heard.has_begun.is_set()
        if how != "closed":
            before = len(writing.events)
            more, served = job(scheduler.runner, tiny.prompt(20), policy, max_new_tokens=3)
            scheduler.submit(more)
            assert served.end().reason == "length"
            assert len(writing.events) > before and not writing.has_ended.is_set()


# Tenants


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_long_prompts_of_one_tenant_do_not_hold_up_another(model: Model, parts: Parts, policy: str) -> None:
    order: list[str] = []
    when: list[int] = []  # parts that had run when b was told
    ticks = count()
    with scheduling(model, policy, slice_s=0.0, clock=lambda: float(next(ticks))) as scheduler:
        made = [job(scheduler.runner, LONG, policy, max_new_tokens=3, tenant="a") for _ in range(4)]
        hi, heard_hi = job(scheduler.runner, tiny.prompt(9), policy, max_new_tokens=1, tenant="b")
        for one, heard in made:
            noting(order, "a", one, heard)
        noting(order, "b", hi, heard_hi)
        parts.at[10] = partial(scheduler.submit, hi)
        told = hi.listener

        def tell(event: Event) -> None:
            when.append(parts.num)
            told(event)

        hi.listener = tell
        for one, _ in made:
            scheduler.submit(one)
        assert all(heard.end().reason == "length" for _, heard in [*made, (hi, heard_hi)])
    assert order == ["b", "a", "a", "a", "a"]
    assert when[0] - 10 <= 6 * model.spec.num_layers, "of 108 parts and more"


def test_long_prompts_leave_a_place_for_a_short_one_of_the_same_tenant(model: Model) -> None:
    order: list[str] = []
    with scheduling(model, slice_s=0.0) as scheduler:
        stream, writing = job(scheduler.runner, tiny.prompt(9), max_new_tokens=900)
        scheduler.submit(stream)
        assert writing.has_written.wait(60)
        made = [job(scheduler.runner, LONG[:100], max_new_tokens=1) for _ in range(4)]
        made.append(job(scheduler.runner, tiny.prompt(9), max_new_tokens=1))
        for number, (one, heard) in enumerate(made):
            noting(order, str(number), one, heard)
            scheduler.submit(one)
        assert all(heard.end().reason == "length" for _, heard in made)
    assert order[0] == "4"


def test_a_place_to_run_is_kept_for_who_runs_nothing(model: Model) -> None:
    with scheduling(model, max_running=3, num_reserved=1) as scheduler:
        made = [job(scheduler.runner, tiny.prompt(9), max_new_tokens=900, tenant="a") for _ in range(4)]
        for one, _ in made:
            scheduler.submit(one)
        assert made[1][1].has_written.wait(60)
        hi, heard = job(scheduler.runner, tiny.prompt(5), max_new_tokens=2, tenant="b")
        scheduler.submit(hi)
        assert heard.end().reason == "length"
        assert not made[2][1].has_begun.is_set(), "two of three places are one tenant's most"
        assert not made[0][1].has_ended.is_set()
    with (
        pytest.raises(InputError, match="num_reserved is 3; it must be at least 0 and below max_running, 3"),
        scheduling(model, max_running=3, num_reserved=3),
    ):
        pass


def test_who_waits_for_its_own_tenant_s_memory_lets_others_pass() -> None:
    small = tiny.ready("llama", capacity=100 * 4096)
    with scheduling(small) as scheduler:
        first, writing = job(scheduler.runner, tiny.prompt(200), max_new_tokens=100, tenant="a")
        scheduler.submit(first)
        assert writing.has_written.wait(60)
        big, waiting = job(scheduler.runner, tiny.prompt(400), max_new_tokens=1, tenant="a")
        hi, heard = job(scheduler.runner, tiny.prompt(5), max_new_tokens=1, tenant="b")
        scheduler.submit(big)
        scheduler.submit(hi)
        assert heard.end().reason == "length"
        assert not waiting.has_begun.is_set() and not writing.has_ended.is_set()
        assert waiting.end().reason == "length"


def test_prompts_that_are_read_twice_wait_for_room_to_hold_all_of_it(parts: Parts) -> None:
    """Between the readings the whole cache is held, in more bytes than the codes of all of it would take."""
    policy = "kvzip(chunk=64) + global + 2x + int4"
    small = tiny.ready("llama", capacity=220 * 4096)
    with scheduling(small, policy, slice_s=0.0) as scheduler:
        made = [job(scheduler.runner, LONG, policy, max_new_tokens=3, tenant=str(i)) for i in range(4)]
        for one, _ in made:
            scheduler.submit(one)
        assert [heard.end().reason for _, heard in made] == ["length"] * 4
    num_alone = parts.num // 4
    parts.log.clear()
    alone(small, LONG, policy, 3)
    assert parts.num == num_alone, "no reading was lost for want of pages"
