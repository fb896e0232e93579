"""What is noted of a request: stages that end where it ended, times that need two tokens, facts without text."""

from __future__ import annotations

import pytest

from kvfold.serve.ops.request_trace import Trail


def _trail(**times: float) -> Trail:
    return Trail("req_1", "POST", "/v1/messages", came=0.0, **times)  # type: ignore[arg-type]


def test_stages_follow_each_other() -> None:
    trail = _trail(queued=1.0, let_in=2.0, looked_up=3.0, began=5.0, ended=9.0, done=9.5)
    assert [tuple(stage) for stage in trail.stages] == [
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
        ({"queued": 1.0, "let_in": 2.0, "looked_up": 2.5}, [("queue", 1, 2), ("lookup", 2, 2.5), ("prefill", 2.5, 4)]),
    ],
)
def test_the_last_stage_is_the_one_it_ended_in(times: dict[str, float], stages: list[tuple[str, float, float]]) -> None:
    assert [tuple(stage) for stage in _trail(**times, done=4.0).stages] == stages


def test_times_of_tokens() -> None:
    trail = _trail(queued=1.0, began=2.0, ended=5.0)
    assert (trail.first_token_ms, trail.token_ms, trail.total_ms) == (2000.0, None, None)
    trail.num_output = 4
    assert trail.token_ms == 1000.0


def test_a_reply_that_nobody_waits_for_was_cancelled() -> None:
    trail = Trail()
    trail.finish()
    assert trail.end is None
    trail.queue("tiny", 7)
    trail.finish()
    assert trail.end == "cancelled"


def test_facts_leave_out_what_does_not_apply() -> None:
    trail = _trail(done=0.25)
    trail.status = 200
    assert trail.facts() == {
        "request": "req_1",
        "method": "POST",
        "path": "/v1/messages",
        "status": 200,
        "ms": 250.0,
    }
