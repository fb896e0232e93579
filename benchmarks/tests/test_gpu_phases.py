"""Phases of a prefill add up to it and leave nothing behind; gaps are what no kernel covers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from benchmarks.gpu.common import llama, random_tokens
from benchmarks.gpu.phases import Phases, gaps, prefill_phases
from benchmarks.tests.test_gpu_parts import SMALL
from kvfold.engine.runner import Runner
from kvfold.models.attach import attach
from kvfold.pages.arena import Arena
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy


def test_time_counts_for_the_innermost_phase() -> None:
    clock = SimpleNamespace(now=0.0)

    def work(seconds: float) -> None:
        clock.now += seconds

    def outer() -> None:
        work(1)
        owner.inner()
        work(1)

    owner = SimpleNamespace(inner=lambda: work(2), outer=outer)
    phases = Phases(device=False, clock=lambda: clock.now)
    with phases.watching([(owner, "inner", "in"), (owner, "outer", "out")]):
        work(5)
        owner.outer()
        owner.inner()
    assert phases.host_ms() == {"model": 5000, "in": 4000, "out": 2000}


def test_what_was_watched_is_itself_again() -> None:
    before = PrefillPass.attend
    phases = Phases(device=False)
    with pytest.raises(ZeroDivisionError), phases.watching(prefill_phases(Policy.parse("snapkv + ada + 8x"))):
        raise ZeroDivisionError
    assert PrefillPass.attend is before


def test_a_prefill_passes_through_every_phase() -> None:
    policy = Policy.parse("snapkv + ada + 4x")
    phases = Phases(device=False)
    with attach(llama("cpu", torch.float32, **SMALL)) as attached:
        runner = Runner(attached.model, attached.spec, Arena(1 << 22))
        with phases.watching(prefill_phases(policy)):
            runner.prefill([runner.new_sequence(policy)], [random_tokens(600, 50)])
    found = phases.host_ms()
    assert set(found) == {"model", "attention", "observing", "scoring", "choosing", "writing"}


class Range(NamedTuple):
    start: float
    end: float


def test_gaps_lie_between_kernels_that_do_not_overlap() -> None:
    times = {"a": (0, 10), "b": (5, 30), "c": (12, 20), "d": (50, 60), "e": (62, 70), "f": (100, 101)}
    kernels = [SimpleNamespace(name=name, time_range=Range(*span)) for name, span in times.items()]
    assert gaps(kernels) == [(30, 1, "e -> f"), (20, 1, "b -> d")]
