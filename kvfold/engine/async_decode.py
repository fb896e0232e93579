"""A decode step queued behind another whose tokens the host has not read yet.

Greedy tokens are found on the device and fed to the next step there, so the device goes on while the host makes text
of the last ones. A token that ends its request has been run in vain; it was never kept, so nothing of it is left.

    device   | step 1 | step 2 | step 3 |
    host              | text 1 | text 2 |

    B sequences of the step   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvfold.compress.observe import ObserverNeeds
from kvfold.compress.seal import may_evict
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import likeliest_of
from kvfold.engine.verify import commit_run
from kvfold.models.sentences import needs_sentences
from kvfold.pages.async_copy import sent
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.step import layout_of


class Arriving:
    """The likeliest token after each row of a step: on the device at once, on the host when it has arrived."""

    def __init__(self, sequences: Sequence[SequenceCache], logits_BV: Tensor) -> None:
        self._row = {sequence: row for row, sequence in enumerate(sequences)}
        self._host_B = likeliest_of(logits_BV)
        self._token_B = self._host_B.clamp(min=0)  # a row without one is run in vain: the host will refuse it
        self._event = None
        if logits_BV.is_cuda:  # sent before the next step is queued, or it would arrive after that step
            found_B, self._host_B = self._host_B, torch.empty(len(logits_BV), dtype=torch.int64, pin_memory=True)
            self._host_B.copy_(found_B, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def on_device(self, sequences: Sequence[SequenceCache]) -> Tensor:
        rows = [self._row[sequence] for sequence in sequences]
        if rows == list(range(len(self._row))):
            return self._token_B
        return self._token_B.index_select(0, sent(np.array(rows), self._token_B.device))

    def wait(self, sequences: Sequence[SequenceCache]) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        tokens = self._host_B.tolist()
        return [tokens[self._row[sequence]] for sequence in sequences]


class Ahead:
    """A step that has been queued; its tokens enter the caches of those sequences that are kept."""

    def __init__(self, sequences: Sequence[SequenceCache], logits_BV: Tensor) -> None:
        self._logits = dict(zip(sequences, logits_BV.unbind(), strict=True))
        self.arriving = Arriving(sequences, logits_BV)

    def keep(self, sequence: SequenceCache) -> Tensor:
        """Its token goes on; returns the logits after it."""
        sequence.open.advance(1)
        commit_run(sequence, commit=True)
        return self._logits[sequence]


def can_run_ahead(runner: Runner, sequence: SequenceCache) -> bool:
    """Where steps are captured and note nothing for scorers: a note could not be taken back."""
    if runner.graphs is None or layout_of(sequence) is None or sequence.open.num_slots < 2:
        return False
    return not (ObserverNeeds.of([sequence.policy], decoding=True).anything or needs_sentences(sequence.policy))


def run_ahead(runner: Runner, sequences: Sequence[SequenceCache], token_B: Tensor) -> Ahead | None:
    """Queue a step on tokens of the device; None where there is no memory for it or it raises, which the next step will
    say, or where it would evict, which must wait until the token is known to go on."""
    if any(sequence.open.room == 0 and may_evict(sequence) for sequence in sequences):
        return None
    try:
        return Ahead(sequences, runner.queue(sequences, token_B))
    except Exception:
        return None
