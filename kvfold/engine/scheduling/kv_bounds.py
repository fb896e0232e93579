"""Upper bounds on the KV-cache bytes of a prompt, for admission control, against what the arena has free.

Bounds assume a policy that evicts nothing. A compressing policy needs them only during prefill; afterwards its resident
bytes count. A policy with a replay pass (KVzip) holds the whole prompt uncompressed, in the model's dtype, until then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvfold.compression.full_prompt import full_prompt_classes
from kvfold.engine.runner import Runner
from kvfold.pages.layout import PageClass
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

_MOST_KNOWN = 4096  # sums over all layers that are kept


class Prefilling(Protocol):
    """A task, as far as its prompt takes memory."""

    prompt_bytes: int
    sequence: SequenceCache


class KVBounds:
    """Byte bounds of one policy in one arena."""

    def __init__(self, runner: Runner, policy: Policy) -> None:
        self._arena = runner.arena
        self._layers = runner.spec.layers
        sample = runner.new_sequence(policy)
        self._classes = [sample.page_class(i) for i in range(runner.spec.num_layers)]
        replays = any(term.needs.replay is not None for term in (policy.prefill.score, policy.prefill.evicted))
        self._full_prompt_classes = full_prompt_classes(sample) if replays else []
        self._block_bytes = sample.block_bytes
        self._open_len = sample.config.open_len
        sample.release()
        self._known: dict[tuple[bool, int], int] = {}  # by what is asked and the number of tokens

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of so many tokens if none is evicted, in whole superblocks per layer."""
        return self._block_bytes + self._bytes_of(num_tokens)

    def prefill_bytes(self, num_tokens: int) -> int:
        """Bytes that a prompt of so many tokens takes during its prefill."""
        found = self._bytes_of(num_tokens)
        if self._full_prompt_classes:
            found = max(found, self._bytes_of(num_tokens, full_prompt=True))
        return self._block_bytes + found

    def _bytes_of(self, num_tokens: int, *, full_prompt: bool = False) -> int:
        key = full_prompt, num_tokens
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._sum(self._full_prompt_classes if full_prompt else self._classes, num_tokens)
        return self._known[key]

    def _sum(self, classes: Sequence[PageClass], num_tokens: int) -> int:
        unit, layers = self._arena.superblock_bytes, zip(classes, self._layers, strict=True)
        sizes = (one.span_bytes(layer.num_kv_heads * one.pages_for(num_tokens)) for one, layer in layers)
        return sum(-(-num_bytes // unit) * unit for num_bytes in sizes)

    def most_tokens(self, most: int) -> int:
        """Of a sequence that is alone, of up to `most` tokens."""
        return bisect_right(range(1, most + 1), self._arena.capacity_bytes, key=self._bytes_alone)

    def _bytes_alone(self, num_tokens: int) -> int:
        """Of so many tokens if none is evicted; windowed layers hold their window. Layers of a class share spans."""
        unit, pages = self._arena.superblock_bytes, Counter[PageClass]()
        for page_class, layer in zip(self._classes, self._layers, strict=True):
            num_slots = num_tokens if layer.sliding_window is None else min(num_tokens, layer.sliding_window)
            pages[page_class] += layer.num_kv_heads * page_class.pages_for(num_slots)
        sizes = (page_class.span_bytes(count) for page_class, count in pages.items())
        return self._block_bytes + sum(-(-num_bytes // unit) * unit for num_bytes in sizes)

    def fits(self, num_bytes: int, prompt_bytes: int, prefilling: Iterable[Prefilling], num_decoding: int) -> bool:
        """Whether so many bytes are free beside what prefilling tasks still need of the `prompt_bytes` of their whole
        prompts, and decoding ones for their next seal."""
        free = self._arena.free_bytes - num_bytes - num_decoding * self.kv_bytes(self._open_len)
        if free >= prompt_bytes:  # whatever they hold already
            return True
        for task in prefilling:
            held = task.sequence.resident_bytes + task.sequence.full_prompt_bytes
            free -= max(0, task.prompt_bytes - held)
        return free >= 0
