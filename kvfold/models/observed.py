"""What sequences observed for their scorers: put back after a forward that did not end, dropped once of no use.

New keys and values wait outside the pages until a pass finishes, but what scorers watch (last queries, query moments,
attention mass) is noted layer by layer while the model runs. Those tensors are replaced, never written in place, so
remembering them costs a few references; only captured steps write in place, and of what they wrote a copy is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from kvfold.attend.track import Tracked
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.sidecar import LayerSidecar, Sidecar

# All that a LayerSidecar is made of.
_noted = attrgetter("mass_HS", "open_mass_HR", "last_q_QWD", "moments", "query_end")


class Undo:
    """The observations of some sequences now, to go back to."""

    def __init__(self, sequences: Sequence[SequenceCache]) -> None:
        self._before = [
            (sequence, sequence.sealed_len, list(map(_noted, _kept(sequence.sidecar).layers))) for sequence in sequences
        ]

    def restore(self) -> None:
        """Sequences that sealed tokens since then are left alone: their mass has moved along with the slots."""
        for sequence, sealed_len, layers in self._before:
            if sequence.sealed_len == sealed_len:
                sequence.sidecar = Sidecar([LayerSidecar(*noted) for noted in layers])


def _kept(sidecar: Sidecar) -> Sidecar:
    return sidecar.copy() if sidecar.is_live else sidecar


def forget_prompt(sequence: SequenceCache) -> None:
    """Drop observations that only the prompt's compression needed."""
    needs = Tracked.of([sequence.policy], decoding=True)
    for side in sequence.sidecar.layers:
        if not needs.last_queries:
            side.last_q_QWD = None
        if not needs.query_stats:
            side.moments = None
