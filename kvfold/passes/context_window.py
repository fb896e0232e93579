"""Warn when queries reach past the context window that the model was trained on.

A rotary model sees distances only. With `keep` positions the first slot is as far away as the sequence is long; with
`slot` positions gaps close up, and it is as far away as slots are stored. Past the trained window models break down
(StreamingLLM, arXiv:2309.17453; measured in docs/research/streaming.md), which is a warning, not an error.
"""

from __future__ import annotations

import warnings

from kvfold.errors import KvfoldWarning
from kvfold.pages.sequence import SequenceCache


def warn_if_passing(sequence: SequenceCache, num_tokens: int) -> None:
    """Warn if these new tokens are the first to attend beyond the trained context window."""
    limit = sequence.spec.max_positions
    if not limit or sequence.logical_len + num_tokens <= limit:  # what is stored is never longer
        return
    if not any(layer.compressible and layer.rope is not None for layer in sequence.spec.layers):
        return
    reach = _reach(sequence)
    if reach <= limit < reach + num_tokens:
        warnings.warn(
            f"the sequence passes {limit} positions, which is what {sequence.spec.name} was trained on, so answers may "
            "become nonsense; read less, or use a policy that closes gaps at a bounded size, such as "
            '"streaming + 1024tok + slot"',
            KvfoldWarning,
            stacklevel=2,
        )


def _reach(sequence: SequenceCache) -> int:
    """The largest distance within what is there already."""
    if not sequence.policy.position.shifts:
        return sequence.logical_len
    return max(max(sequence.stored_lens(i)) for i in sequence.spec.compressible_layers) + sequence.open.fill
