"""Counters of all replicas are added, and never fall when one of them starts again."""

from __future__ import annotations

from typing import Any

from kvfold.serve.ops.metrics import Metrics
from kvfold.serve.replicas.combine import MetricsSum, combined_health, combined_state, without_samples


def metrics(count: int, free: int) -> str:
    found = Metrics()
    found.add("kvfold_requests_total", count, path="/a b", status="200")
    found.observe("kvfold_first_token_seconds", 0.02)
    found.gauge("kvfold_arena_free_bytes", "Free.", lambda: free)
    return found.text()


def value(text: str, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_counters_stay_when_a_replica_starts_again_and_gauges_do_not() -> None:
    total = MetricsSum()
    text = total.text({0: (10, metrics(3, 100)), 1: (11, metrics(4, 100))})
    assert value(text, 'kvfold_requests_total{path="/a b"') == 7
    assert value(text, "kvfold_arena_free_bytes") == 200
    assert value(text, 'kvfold_first_token_seconds_bucket{le="0.03"}') == 2
    assert text.count("# TYPE kvfold_first_token_seconds histogram") == 1
    silent = total.text({1: (11, metrics(5, 100))})
    assert (value(silent, "kvfold_requests_total"), value(silent, "kvfold_arena_free_bytes")) == (8, 100)
    nobody = total.text({})
    assert value(nobody, "kvfold_requests_total") == 8, "as last told"
    assert "\nkvfold_arena_free_bytes" not in nobody
    again = total.text({0: (12, metrics(1, 100)), 1: (11, metrics(5, 100))})
    assert value(again, "kvfold_requests_total") == 9
    assert value(total.text({0: (12, metrics(2, 100)), 1: (11, metrics(5, 100))}), "kvfold_requests_total") == 10


def state(start: float, *, done: int, firsts: list[float]) -> Any:
    return {
        "model": "m", "running": 1, "waiting": 2, "arena": {"bytes": 5, "limit_bytes": 10},
        "tiers": [{"name": "device", "bytes": 3, "hits": 1}, {"name": "redis", "bytes": None, "hits": 2}],
        "history": [[start + i, 1, 0, 10 * i, i, i] for i in range(done)],
        "done": done, "refused": 0, "tokens": {"input": 5, "reused": 0, "output": done}, "lookups": {"hit": done},
        "usd": {"cost": 0.5, "saved": -0.1}, "first_token_ms": None, "token_ms": None,
        "requests": [{"request": f"{start}-{i}", "at": start + i} for i in range(done)],
        "first_token_samples_ms": firsts, "token_samples_ms": [],
    }  # fmt: skip


def test_dashboards_are_one() -> None:
    found = without_samples(
        combined_state([state(100.0, done=3, firsts=[1.0, 9.0]), state(100.5, done=2, firsts=[5.0])])
    )
    assert (found["running"], found["waiting"], found["done"], found["model"]) == (2, 4, 5, "m")
    assert found["arena"] == {"bytes": 10, "limit_bytes": 20}
    assert found["tiers"] == [{"name": "device", "bytes": 6, "hits": 2}, {"name": "redis", "bytes": None, "hits": 4}]
    assert found["tokens"] == {"input": 10, "reused": 0, "output": 5}
    assert (found["usd"]["cost"], found["token_ms"]) == (1.0, None)
    assert found["first_token_ms"] == {"num_samples": 3, "p50": 5.0, "p95": 9.0, "p99": 9.0}
    assert found["history"] == [[100.0, 1, 0, 0, 0, 0], [101.0, 2, 0, 10, 1, 1], [102.0, 2, 0, 30, 3, 3]]
    assert [row["at"] for row in found["requests"]] == [102.0, 101.5, 101.0, 100.5, 100.0]
    assert "first_token_samples_ms" not in found


def test_health_is_ok_degraded_or_failed() -> None:
    known = {"status": "ok", "model": "m", "policy": "full", "version": "1", "running": 1, "waiting": 0}
    found, status = combined_health({0: known, 1: known}, [True, True])
    assert (found["status"], found["running"], status) == ("ok", 2, 200)
    found, status = combined_health({1: known}, [False, True])
    assert (found["status"], found["replicas"][0], status) == ("degraded", {"status": "down"}, 200)
    found, status = combined_health({1: known}, [True, True])
    assert (found["status"], found["replicas"][0], status) == ("ok", {"status": "silent"}, 200), "as last known"
    assert combined_health({0: {"status": "failed"}}, [True], is_known=False) == ({"status": "failed"}, 503)
    assert combined_health({0: {"status": "ok"}}, [True], is_known=False) == ({"status": "ok"}, 200), "the status alone"
    assert combined_health({}, [False, False], is_known=False) == ({"status": "failed"}, 503)
