"""A loaded model as the root: random weights write no code, so turns end by their bounds; sub-calls are real."""

from __future__ import annotations

from itertools import count

import pytest

from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.recurse.budget import Budget, Meter
from kvfold.recurse.calls import Calls, Prompt
from kvfold.recurse.code_read import SessionRoot, SubCalls, read_by_code
from kvfold.recurse.code_root import CodeRoot, RootStopped
from kvfold.recurse.context import Context
from kvfold.session import Session
from tests.recurse.test_code_root import LIMITS, READY, Scripted
from tests.recurse.texts import long_model

pytest.importorskip("pydantic_monty", reason="pydantic-monty is not installed")


@pytest.fixture(scope="module")
def long() -> Model:
    return long_model()


def test_a_model_that_writes_no_code_ends_by_its_bounds_and_frees_its_cache(long: Model) -> None:
    context = Context("The code is {4711}.", metadata={"Title": "Codes"}, variables={"what": "code"})
    found = read_by_code(long, context, "What is the {what}?", max_turns=2, code_tokens=16, limits=LIMITS)
    assert (found.text, found.stopped_by, len(found.turns)) == ("", "turns", 2)
    assert found.usage.calls == 2 and found.usage.tokens_generated == 32
    assert found.usage.tokens_read > 900 and found.seconds > 0
    assert long.arena.used_bytes == 0


def test_a_root_stops_at_its_window_and_at_its_budget(long: Model) -> None:
    with Session(long) as session:
        with pytest.raises(RootStopped, match="window"):
            SessionRoot(session, Meter(Budget())).reply("a" * 3700)
        with pytest.raises(RootStopped, match="tokens"):
            SessionRoot(session, Meter(Budget(tokens=100))).reply("a" * 50)
        with pytest.raises(RootStopped, match="seconds"):
            SessionRoot(session, Meter(Budget(seconds=1e-9))).reply("a" * 50)
        assert session.token_ids == []


def test_a_reply_of_the_root_ends_with_the_seconds(long: Model) -> None:
    ticks = count()
    with Session(long) as session:
        meter = Meter(Budget(seconds=10), clock=lambda: float(next(ticks)))
        with pytest.raises(RootStopped, match="seconds"):
            SessionRoot(session, meter, 500).reply("a" * 50)
        assert 0 < meter.usage.tokens_generated < 20 and meter.usage.tokens_read > 50
        assert len(session.token_ids) == meter.usage.tokens


@pytest.mark.parametrize("policy", ["full", "keydiff + 2x"])
def test_sub_prompts_of_code_are_batched_calls_of_the_model(long: Model, policy: str) -> None:
    root = Scripted("parts = [context[:40], context[40:]]\nprint(llm_query_batched(parts))", READY.format("done"))
    text = "the cat saw a bird. " * 8
    with Calls(long, policy) as calls:
        sub = SubCalls(calls, Meter(Budget()), max_new_tokens=5)
        found = CodeRoot(root, sub, LIMITS).read(text, "What?")
        usage = calls.usage
    assert found.text == "done"
    assert (usage.calls, usage.batches) == (2, 1)
    with Calls(long, policy) as calls:
        expected = calls.ask_batch([Prompt(part, max_new_tokens=5) for part in (text[:40], text[40:])])
    assert root.heard[1] == f"Output:\n{[reply.text.strip() for reply in expected]!r}\n"


def test_sub_prompts_beyond_window_or_budget_are_refused_before_any_runs(long: Model) -> None:
    with Calls(long) as calls:
        meter = Meter(Budget(calls=3))
        meter.usage = calls.usage
        sub = SubCalls(calls, meter, max_new_tokens=5)
        with pytest.raises(InputError, match=r"a prompt has 50\d\d tokens; at most 4091 fit the window"):
            sub(["a" * 5000])
        with pytest.raises(InputError, match="the budget of calls allows 2 of 3 prompts; ask fewer"):
            sub(["a", "b", "c"])
        assert calls.usage.calls == 0
        assert len(sub(["a", "b"])) == 2
