"""What calls of a model cost: calls, tokens, seconds, bytes. Everything is measured, and adds up over batches."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass
class Usage:
    """Sums over calls.

    Attributes:
        calls: Replies that were asked for.
        batches: Groups of calls that were decoded together.
        tokens_read: Tokens prefilled: the shared prefix once, then what each call adds to it.
        tokens_shared: Tokens of the prefix that forks reused instead of reading them again.
        tokens_generated: Tokens of the replies.
        prefill_s: Seconds of prefills.
        decode_s: Seconds of decoding.
        setup_s: CUDA graph capture and compilation meanwhile; not in `decode_s`.
        full_bytes: What ordinary bf16 caches of all calls would hold, each at the end of its prefill.
        resident_bytes: What they held then, the shared prefix counted in each.
        drafted: Tokens drafted by n-gram lookup.
        accepted: Drafted tokens that were accepted.
    """

    calls: int = 0
    batches: int = 0
    tokens_read: int = 0
    tokens_shared: int = 0
    tokens_generated: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    setup_s: float = 0.0
    full_bytes: int = 0
    resident_bytes: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Usage) -> None:
        """Add what other calls cost."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def tokens(self) -> int:
        """Tokens that the model ran: read and generated."""
        return self.tokens_read + self.tokens_generated

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        """TypeError for a field that does not exist."""
        return cls(**row)
