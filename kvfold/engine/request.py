"""A generation request: the sequence and logits it starts from, its limits, its output and its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kvfold.engine.sampling import Sampling
from kvfold.engine.speculate import Drafter
from kvfold.errors import InputError
from kvfold.pages.sequence import SequenceCache

StopReason = Literal["length", "eos", "stop"]


@dataclass
class Request:
    """A generation request: the sequence and logits it starts from, its limits, its output and its times."""

    sequence: SequenceCache
    logits_V: Tensor
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    drafter: Drafter | None = None  # over the tokens before the request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: StopReason | None = None
    decode_s: float = 0.0
    setup_s: float = 0.0
    num_steps: int = 0  # tokens that entered the KV cache
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise InputError("stop is a list of non-empty strings")

    @property
    def decode_ms(self) -> float:
        """Mean inter-token latency."""
        return 1e3 * self.decode_s / max(self.num_steps, 1)

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean tokens per decode pass: 1 without drafts, one more than the accepted ones with them."""
        return 1 + self.num_accepted / self.num_passes if self.num_passes else None
