"""Calls within a budget, with a journal: replies that it has are not asked for again, new ones are written to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvfold.engine.layer_major import Progress
from kvfold.recurse.budget import Meter
from kvfold.recurse.calls import Calls, Prompt
from kvfold.recurse.journal import Journal, Recorded, digest
from kvfold.reply import Reply


class BoundedCalls:
    """`stopped_by` names the bound that left calls unasked, once one did."""

    def __init__(self, calls: Calls, meter: Meter, journal: Journal | None = None) -> None:
        self.calls = calls
        self.journal = journal
        self.meter = meter
        self.stopped_by: str | None = None
        self.num_resumed = 0

    def replies(
        self, prompts: Sequence[Prompt], *, reserved_calls: int = 0, progress: Progress | None = None
    ) -> Iterator[tuple[int, Recorded]]:
        """(index of a prompt, its reply), batch by batch, until all are there or a bound is reached. `reserved_calls`
        are kept for later levels."""
        keys = [digest({"prompt": prompt}) for prompt in prompts]
        waiting = []
        for index, key in enumerate(keys):
            known = None if self.journal is None else self.journal.get(key)
            if known is None:
                waiting.append(index)
            else:
                self.num_resumed += 1
                yield index, known
                if progress is not None:
                    progress(known.num_tokens)
        lens = {index: self.calls.num_tokens(prompts[index]) for index in waiting}
        while waiting:
            needs = [lens[index] + prompts[index].max_new_tokens for index in waiting]
            count, reason = self.meter.affordable(needs, reserved_calls)
            if count == 0:
                self.stopped_by = reason
                return
            count = 1 if self.meter.starts_with_one else count
            now = waiting[:count]
            for batch in self.calls.batches([prompts[index] for index in now], progress=progress):
                done = [(now[at], _recorded(reply, lens[now[at]])) for at, reply in batch]
                if self.journal is not None:
                    self.journal.add((keys[index], reply) for index, reply in done)
                asked = {index for index, _ in done}
                waiting = [index for index in waiting if index not in asked]
                yield from done
                if self.meter.is_late:
                    break


def _recorded(reply: Reply, num_tokens: int) -> Recorded:
    return Recorded(reply.text, num_tokens, is_cut=reply.reason == "length")
