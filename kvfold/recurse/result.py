"""The result of a reading: the answer with its quotes, the tree, what it cost, and what compression did to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvfold.recurse.tree import Node, Quote
from kvfold.recurse.usage import Usage


@dataclass(frozen=True)
class KVFacts:
    """What compression did in this run; None where this run did not measure it.

    Attributes:
        full_bytes: What ordinary bf16 caches of all calls would hold.
        resident_bytes: What they held; None if every reply came from a journal.
        quality_retention: Share of re-read parts that have the same reply with the full cache.
        throughput_gain: Tokens of the text per second, against one call at a time that shares nothing.
        speculative_speedup: Decoding seconds per token without drafts, by those with drafts.
    """

    full_bytes: int | None = None
    resident_bytes: int | None = None
    quality_retention: float | None = None
    throughput_gain: float | None = None
    speculative_speedup: float | None = None

    @property
    def compression_ratio(self) -> float | None:
        """Full bytes by resident bytes."""
        return self.full_bytes / self.resident_bytes if self.full_bytes and self.resident_bytes else None

    @property
    def memory_saved_bytes(self) -> int | None:
        """Full bytes less resident bytes; negative where pages of short texts take more than they save."""
        if self.full_bytes is None or self.resident_bytes is None:
            return None
        return self.full_bytes - self.resident_bytes

    def as_json(self) -> dict[str, Any]:
        names = ("compression_ratio", "memory_saved_bytes", "quality_retention", "throughput_gain")
        return {name: getattr(self, name) for name in (*names, "speculative_speedup")}


@dataclass(frozen=True)
class ReadResult:
    """What was read.

    Attributes:
        text: The answer; empty if the text does not say.
        quotes: Sentences of the text that have the answer, verbatim, with their places.
        tree: Every call.
        usage: Calls, tokens, seconds and bytes of this run.
        kv: What compression did, as far as this run measured it.
        stopped_by: Which budget ended it early ("depth", "calls", "tokens", "seconds"), or "interrupt"; None: complete.
        is_plain: Whether the text fitted one call, without a tree.
        num_dropped: Replies whose words are not in the text.
        num_cut: Replies that ended at the token limit.
        num_resumed: Calls whose replies came from a journal.
        chunk_tokens: The most tokens of the text in one call.
        seconds: Wall-clock time.
        checks: What checks of the replies did (`ReadReport`); None if they were not asked for.
    """

    text: str
    quotes: tuple[Quote, ...]
    tree: Node = field(repr=False)
    usage: Usage
    kv: KVFacts
    stopped_by: str | None = None
    is_plain: bool = False
    num_dropped: int = 0
    num_cut: int = 0
    num_resumed: int = 0
    chunk_tokens: int = 0
    seconds: float = 0.0
    checks: dict[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        return self.stopped_by is None

    @property
    def num_unread(self) -> int:
        """Parts of the text that no call has read."""
        return sum(node.state == "unread" for node in self.tree.walk() if node.level == 1)

    def as_json(self) -> dict[str, Any]:
        counts = ("num_dropped", "num_cut", "num_resumed", "num_unread")
        facts = ("stopped_by", "is_complete", "is_plain", *counts, "chunk_tokens")
        return {
            "answer": self.text,
            "quotes": [asdict(quote) for quote in self.quotes],
            **{name: getattr(self, name) for name in facts},
            "seconds": self.seconds,
            "checks": self.checks,
            "usage": self.usage.as_json(),
            "kv": self.kv.as_json(),
            "tree": self.tree.as_json(),
        }
