"""Asynchronous greedy decoding: step t+1 is launched on device-side argmax tokens before the host reads step t.

The device runs while the host detokenizes. A token that ends its request has been run for nothing: it is never appended
to the KV cache, and its slot is discarded.

    device   | step 1       | step 2       | step 3       |
    host                    | detokenize 1 | detokenize 2 |

    B sequences of the step   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvfold.compression.observe import ObserverNeeds
from kvfold.engine.runner import Runner
from kvfold.engine.sampling import greedy_tokens
from kvfold.engine.verify import commit_run
from kvfold.models.sentences import needs_sentences
from kvfold.pages.async_copy import sent
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.step import layout_of


class AsyncTokens:
    """The argmax token of each row of a step: on the device at once, on the host after an asynchronous copy."""

    def __init__(self, sequences: Sequence[SequenceCache], logits_BV: Tensor) -> None:
        self._row = {sequence: row for row, sequence in enumerate(sequences)}
        self._host_B = greedy_tokens(logits_BV)
        self._token_B = self._host_B.clamp(min=0)  # NO_TOKEN runs as token 0; the host fails its request
        self._event = None
        if logits_BV.is_cuda:  # copied before the next step is launched, or it would wait for that step
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


class InFlightStep:
    """A launched step; its tokens enter the KV caches of the sequences that `keep` is called for."""

    def __init__(self, sequences: Sequence[SequenceCache], logits_BV: Tensor) -> None:
        self._logits = dict(zip(sequences, logits_BV.unbind(), strict=True))
        self.tokens = AsyncTokens(sequences, logits_BV)

    def keep(self, sequence: SequenceCache) -> Tensor:
        """Append its token to the KV cache; returns the logits after it."""
        sequence.open.advance(1)
        commit_run(sequence, commit=True)
        return self._logits[sequence]


def can_decode_async(runner: Runner, sequence: SequenceCache) -> bool:
    """Whether steps are captured and no scorer observes them: an observation could not be undone."""
    if runner.graphs is None or layout_of(sequence) is None or sequence.open.num_slots < 2:
        return False
    return not (ObserverNeeds.of([sequence.policy], decoding=True).anything or needs_sentences(sequence.policy))


def launch_next(runner: Runner, sequences: Sequence[SequenceCache], token_B: Tensor) -> InFlightStep | None:
    """Launch a step on device-side tokens. None if it runs out of pages or raises, which the next synchronous step will
    raise again, or if it would evict, which must wait until the token is known to be kept."""
    if any(sequence.open.room == 0 and sequence.policy.decode.may_evict for sequence in sequences):
        return None
    try:
        return InFlightStep(sequences, runner.launch(sequences, token_B))
    except Exception:
        return None
