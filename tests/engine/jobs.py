"""Jobs for the scheduler's tests: where they begin, and what they were told."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event as Flag
from typing import Any

from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.jobs import Ended, Event, Job, PrefillDone, SequenceStart, TextDelta
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy


class Fresh:
    """Begins with nothing; notes the lengths at which it was told."""

    def __init__(self, runner: Runner, policy: str = "full", cuts: Sequence[int] | None = None) -> None:
        self.runner, self.policy, self.cuts = runner, Policy.parse(policy), cuts
        self.lens: list[int] = []

    def begin(self) -> SequenceStart:
        return SequenceStart(self.runner.new_sequence(self.policy), 0, self.cuts)

    def lost(self) -> None:
        raise AssertionError("it began with nothing")

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        assert sequence.committed_len >= num_read
        self.lens.append(num_read)

    def began(self) -> None:
        self.lens.append(0)


class Heard:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.has_begun, self.has_written, self.has_ended = Flag(), Flag(), Flag()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, PrefillDone):
            self.has_begun.set()
        elif isinstance(event, TextDelta):
            self.has_written.set()
        else:
            self.has_ended.set()

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    def end(self, timeout_s: float = 600) -> Ended:
        """How it ended, once it has."""
        assert self.has_ended.wait(timeout_s), "the job did not end"
        (found,) = (event for event in self.events if isinstance(event, Ended))
        return found


def job(runner: Runner, tokens: Sequence[int], policy: str = "full", **options: Any) -> tuple[Job, Heard]:
    heard = Heard()
    return Job(tokens, Fresh(runner, policy, options.pop("cuts", None)), heard, **options), heard
