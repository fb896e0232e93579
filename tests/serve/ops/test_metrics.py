"""Metrics that Prometheus can compute rates and quantiles of, from the first scrape on."""

from __future__ import annotations

import re

from kvfold.serve.ops.metrics import BUCKETS_S, HISTOGRAMS, Metrics


def _buckets(metrics: Metrics, name: str) -> list[tuple[str, int]]:
    found = re.findall(rf'^{name}_bucket{{le="(.+)"}} (\d+)$', metrics.text(), re.MULTILINE)
    return [(bound, int(count)) for bound, count in found]


def test_a_histogram_has_all_its_buckets_before_anything_was_observed() -> None:
    metrics = Metrics()
    bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
    for name in HISTOGRAMS:
        assert _buckets(metrics, name) == [(bound, 0) for bound in bounds]
        assert {f"{name}_sum 0", f"{name}_count 0"} <= set(metrics.text().splitlines())


def test_buckets_below_the_smallest_value_stay() -> None:
    metrics, name = Metrics(), HISTOGRAMS[0]
    for seconds in (0.5, 0.5, 200.0):
        metrics.observe(name, seconds)
    assert [count for _, count in _buckets(metrics, name)] == [0] * 6 + [2] * 5 + [3]
    assert {f"{name}_sum 201", f"{name}_count 3"} <= set(metrics.text().splitlines())
