"""What a chain of checked steps did: its steps with their attempts, and the sums over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvfold.engine.output_processor import StopReason


@dataclass(frozen=True)
class Attempt:
    """One try at a step. `refusals`: (name of a check, its reason); a try without any passes."""

    text: str
    num_tokens: int
    reason: StopReason
    refusals: tuple[tuple[str, str], ...] = ()

    @property
    def passed(self) -> bool:
        return not self.refusals


@dataclass(frozen=True)
class Step:
    """Attempts at one step, the last of which counts.

    Attributes:
        attempts: In their order.
        is_kept: Whether the last one is in the cache; a refused one is only if the chain keeps them.
        first_right: Whether the first one is right by the ground truth; None if that is unknown.
        last_right: Whether the last one is.
    """

    attempts: tuple[Attempt, ...]
    is_kept: bool
    first_right: bool | None = None
    last_right: bool | None = None

    @property
    def text(self) -> str:
        return self.attempts[-1].text

    @property
    def passed(self) -> bool:
        return self.attempts[-1].passed

    @property
    def is_last(self) -> bool:
        """Whether the model ended its reply with this step."""
        return self.attempts[-1].reason == "eos"

    @property
    def num_retries(self) -> int:
        return len(self.attempts) - 1


@dataclass(frozen=True)
class ChainReport:
    """Sums over the steps of a chain.

    Attributes:
        steps: Steps that were asked for.
        failed: Steps without an attempt that passed.
        retries: Attempts beyond the first of each step.
        tokens: Tokens of the chain at its end: read before it, read in it, and kept.
        tokens_generated: By all attempts.
        tokens_wasted: Generated and cropped, and reasons that were read.
        refusals: Name of a check -> how many attempts it refused.
        accuracy_without: Share of first attempts that are right, of steps with a known truth; None if there are none.
        accuracy_with: Share of steps that passed and are right, of the same steps.
        peak_bytes: The most that the arena had in use since the chain began, other sessions included.
        full_bytes: What an ordinary bf16 cache of `tokens` holds.
    """

    steps: int
    failed: int
    retries: int
    tokens: int
    tokens_generated: int
    tokens_wasted: int
    refusals: dict[str, int]
    accuracy_without: float | None
    accuracy_with: float | None
    peak_bytes: int
    full_bytes: int

    @classmethod
    def of(
        cls, steps: Sequence[Step], *, tokens: int, tokens_noted: int, peak_bytes: int, full_bytes: int
    ) -> ChainReport:
        attempts = [attempt for step in steps for attempt in step.attempts]
        kept = [step.attempts[-1].num_tokens for step in steps if step.is_kept]
        generated = sum(attempt.num_tokens for attempt in attempts)
        known = [step for step in steps if step.first_right is not None]
        return cls(
            steps=len(steps),
            failed=sum(not step.passed for step in steps),
            retries=sum(step.num_retries for step in steps),
            tokens=tokens,
            tokens_generated=generated,
            tokens_wasted=generated - sum(kept) + tokens_noted,
            refusals=dict(Counter(name for attempt in attempts for name, _ in attempt.refusals)),
            accuracy_without=_share([step.first_right for step in known]),
            accuracy_with=_share([step.passed and step.last_right for step in known]),
            peak_bytes=peak_bytes,
            full_bytes=full_bytes,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _share(right: Sequence[bool | None]) -> float | None:
    return sum(map(bool, right)) / len(right) if right else None
