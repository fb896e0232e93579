"""How much of an arena a prompt may come to take, beside what those that run may need next.

Bounds are for a policy that drops nothing; one that compresses needs them only while it reads, and what it holds
afterwards is counted as it is. One that reads a prompt twice holds all of it between the two, in the model's own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.compress.full_prompt import full_prompt_classes
from kvfold.engine.runner import Runner
from kvfold.pages.layout import PageClass
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy


class Room:
    """Bounds of one policy in one arena."""

    def __init__(self, runner: Runner, policy: Policy) -> None:
        self._arena = runner.arena
        self._heads = [layer.num_kv_heads for layer in runner.spec.layers]
        sample = runner.new_sequence(policy)
        self._classes = [sample.page_class(i) for i in range(runner.spec.num_layers)]
        reads_twice = any(term.needs.replay is not None for term in (policy.prefill.score, policy.prefill.evicted))
        self._held_classes = full_prompt_classes(sample) if reads_twice else []
        self._block_bytes = sample.block_bytes
        self._open_len = sample.config.open_len
        sample.release()

    def bound(self, num_tokens: int) -> int:
        """Bytes that so many tokens take if all are kept, in superblocks of each layer's own."""
        return self._block_bytes + self._bytes_of(self._classes, num_tokens)

    def reading_bound(self, num_tokens: int) -> int:
        """Bytes that a prompt of so many tokens takes while it is read."""
        if not self._held_classes:
            return self.bound(num_tokens)
        return max(self.bound(num_tokens), self._block_bytes + self._bytes_of(self._held_classes, num_tokens))

    def _bytes_of(self, classes: Sequence[PageClass], num_tokens: int) -> int:
        total, unit = 0, self._arena.superblock_bytes
        for page_class, heads in zip(classes, self._heads, strict=True):
            num_bytes = page_class.span_bytes(heads * page_class.pages_for(num_tokens))
            total += -(-num_bytes // unit) * unit
        return total

    def fits(
        self,
        num_bytes: int,
        reading: Sequence[SequenceCache],
        reading_lens: Sequence[int],
        writing: Sequence[SequenceCache],
    ) -> bool:
        """Whether so much can be taken while others read their prompts, of which a part may be read and held already,
        and go on to their next seal."""
        unread = 0
        for sequence, length in zip(reading, reading_lens, strict=True):
            unread += max(0, self.reading_bound(length) - sequence.resident_bytes - sequence.held_bytes)
        growth = len(writing) * self.bound(self._open_len)
        return self._arena.free_bytes >= num_bytes + unread + growth
