"""How much of an arena a prompt may come to take, beside what those that run may need next.

Bounds are for a policy that drops nothing; one that compresses needs them only while it reads, and what it holds
afterwards is counted as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.engine.runner import Runner
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy


class Room:
    """Bounds of one policy in one arena."""

    def __init__(self, runner: Runner, policy: Policy) -> None:
        self._arena = runner.arena
        self._heads = [layer.num_kv_heads for layer in runner.spec.layers]
        sample = runner.new_sequence(policy)
        self._classes = [sample.page_class(i) for i in range(runner.spec.num_layers)]
        self._block_bytes = sample.block_bytes
        self._open_len = sample.config.open_len
        sample.release()

    def bound(self, num_tokens: int) -> int:
        """Bytes that so many tokens take if all are kept, in superblocks of each layer's own."""
        total, unit = self._block_bytes, self._arena.superblock_bytes
        for page_class, heads in zip(self._classes, self._heads, strict=True):
            num_bytes = page_class.span_bytes(heads * page_class.pages_for(num_tokens))
            total += -(-num_bytes // unit) * unit
        return total

    def fits(
        self,
        num_tokens: int,
        reading: Sequence[SequenceCache],
        reading_lens: Sequence[int],
        writing: Sequence[SequenceCache],
    ) -> bool:
        """Whether a prompt of num_tokens can be read while the others go on to their next seal."""
        lens = zip(reading, reading_lens, strict=True)
        unread = sum(max(0, self.bound(length) - sequence.resident_bytes) for sequence, length in lens)
        growth = len(writing) * self.bound(self._open_len)
        return self._arena.free_bytes >= self.bound(num_tokens) + unread + growth
