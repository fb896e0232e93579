"""What is noted of a request: stages that end where it ended, times that need two tokens, facts without text."""

from __future__ import annotations

import pytest

from kvfold.serve.ops.request_trace import RequestTrace


def _trace(**times: float) -> RequestTrace:
    return RequestTrace("req_1", "POST", "/v1/messages", arrived=0.0, **times)  # type: ignore[arg-type]


def test_stages_follow_each_other() -> None:
    trace = _trace(queued=1.0, scheduled=2.0, looked_up=3.0, first_token=5.0, ended=9.0, done=9.5)
    assert [tuple(stage) for stage in trace.stages] == [
        ("queue", 1.0, 2.0),
        ("lookup", 2.0, 3.0),
        ("prefill", 3.0, 5.0),
        ("decode", 5.0, 9.0),
    ]


@pytest.mark.parametrize(
    ("times", "stages"),
    [
        ({}, []),
        ({"queued": 1.0}, [("queue", 1.0, 4.0)]),
        (
            {"queued": 1.0, "scheduled": 2.0, "looked_up": 2.5},
            [("queue", 1, 2), ("lookup", 2, 2.5), ("prefill", 2.5, 4)],
        ),
    ],
)
def test_the_last_stage_is_the_one_it_ended_in(times: dict[str, float], stages: list[tuple[str, float, float]]) -> None:
    assert [tuple(stage) for stage in _trace(**times, done=4.0).stages] == stages


def test_times_of_tokens() -> None:
    trace = _trace(queued=1.0, first_token=2.0, ended=5.0)
    assert (trace.first_token_ms, trace.token_ms, trace.total_ms) == (2000.0, None, None)
    trace.num_output = 4
    assert trace.token_ms == 1000.0


def test_a_reply_that_nobody_waits_for_was_cancelled() -> None:
    trace = RequestTrace()
    trace.finish()
    assert trace.end is None
    trace.queue("tiny", 7)
    trace.finish()
    assert trace.end == "cancelled"


def test_facts_leave_out_what_does_not_apply() -> None:
    trace = _trace(done=0.25)
    trace.status = 200
    assert trace.facts() == {
        "request": "req_1",
        "method": "POST",
        "path": "/v1/messages",
        "status": 200,
        "ms": 250.0,
    }
