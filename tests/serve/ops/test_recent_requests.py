"""The latest requests: bounded, with exact percentiles, and dollars where there is a price."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.serve.cache.usage import Price, Usage
from kvfold.serve.ops.recent_requests import NUM_SAMPLES, RecentRequests, percentiles
from kvfold.serve.ops.request_trace import RequestTrace


def _done(number: int, **facts: object) -> RequestTrace:
    times = {"arrived": 0.0, "queued": 0.0, "first_token": float(number), "ended": 2.0 * number}
    return RequestTrace(f"req_{number}", status=200, num_output=2, **{**times, **facts})  # type: ignore[arg-type]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([]) is None
    assert percentiles([7.0]) == {"num_samples": 1, "p50": 7.0, "p95": 7.0, "p99": 7.0}
    hundred = percentiles(map(float, range(100, 0, -1)))
    assert hundred == {"num_samples": 100, "p50": 50.0, "p95": 95.0, "p99": 99.0}


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_percentile_has_its_share_at_or_below_it(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    for share in (50, 95, 99):
        value = found[f"p{share}"]
        assert value in values
        assert 100 * sum(other <= value for other in values) >= share * len(values)
        assert 100 * sum(other < value for other in values) < share * len(values)


def test_it_lists_the_latest_first_and_forgets_the_oldest() -> None:
    recent = RecentRequests(num_listed=2, num_timed=2)
    for number in (1, 2, 3):
        trace = _done(number)
        recent.add(trace)
        recent.finish(trace)
    assert [trace.id for trace in recent.listed()] == ["req_3", "req_2"]
    assert recent.find("req_1") is None
    assert recent.find("req_2") is recent.listed()[1]
    assert list(recent.first_token_ms) == [2000.0, 3000.0]
    assert (recent.num_done, recent.num_refused) == (3, 0)


def test_what_was_refused_counts_apart() -> None:
    recent = RecentRequests()
    recent.finish(RequestTrace(status=429))
    assert (recent.num_done, recent.num_refused) == (0, 1)
    assert not recent.lookups
    assert not recent.first_token_ms


def test_tokens_lookups_and_dollars_add_up() -> None:
    recent = RecentRequests(Price(4.0, 8.0))
    written, read = Usage(0, 0, 1_000_000, 0), Usage(1_000_000, 0, 0, 0)
    recent.finish(_done(1, usage=written, miss="absent", num_prompt=1_000_000))
    assert recent.saved_usd == pytest.approx(-1.0), "what is written costs a quarter more"
    recent.finish(_done(2, usage=read, num_prompt=1_000_000, num_reused=1_000_000))
    assert recent.saved_usd == pytest.approx(-1.0 + 3.6)
    assert recent.cost_usd == pytest.approx(5.0 + 0.4 + 4 * 8e-6)
    assert recent.lookups == {"absent": 1, "hit": 1}
    assert recent.tokens == {"input": 2_000_000, "reused": 1_000_000, "output": 4}


def test_without_a_price_no_dollars_are_counted() -> None:
    recent = RecentRequests()
    recent.finish(_done(1, usage=Usage(9, 0, 0, 1), num_prompt=10))
    assert (recent.cost_usd, recent.saved_usd) == (0.0, 0.0)


def test_the_history_counts_tokens_of_replies_that_still_run_and_is_bounded() -> None:
    recent, running = RecentRequests(), RequestTrace("req_9", num_output=4)
    recent.add(running)
    recent.add(_done(1, miss="unmarked", usage=Usage(0, 0, 0, 7), done=3.0))
    recent.finish(_done(1, miss="unmarked", usage=Usage(0, 0, 0, 7)))
    recent.finish(_done(2, usage=Usage(7, 0, 0, 0)))
    assert recent.sample(1, 0)[1:] == (1, 0, 8, 1, 1), "an unmarked prompt is no lookup"
    for _ in range(2 * NUM_SAMPLES):
        recent.history.append(recent.sample(1, 0))
    assert len(recent.history) == NUM_SAMPLES
