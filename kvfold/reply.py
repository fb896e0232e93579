"""Generation options and the reply of `Session.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from kvfold.engine.request import Request, StopReason
from kvfold.stats import Stats


@dataclass(frozen=True)
class Reply:
    """The result of a generation."""

    text: str
    token_ids: list[int]
    reason: StopReason
    stats: Stats
    decode_ms: float  # mean inter-token latency

    @classmethod
    def of(cls, request: Request, stats: Stats) -> Reply:
        """The reply of a request that has ended; `stats` of its session now."""
        assert request.reason is not None
        stats = replace(
            stats,
            decode_ms=request.decode_ms,
            setup_s=request.setup_s,
            drafted=request.num_drafted,
            accepted=request.num_accepted,
            tokens_per_pass=request.tokens_per_pass,
        )
        return cls(request.text, request.token_ids, request.reason, stats, request.decode_ms)


class GenerateOptions(TypedDict, total=False):
    """Options of `Session.generate` and `Session.ask`."""

    temperature: float  # 0, the default: greedy
    top_k: int  # 0: all tokens
    top_p: float
    seed: int
    stop: Sequence[str]  # stop strings, which are cut off
    speculate: bool | int  # draft so many tokens by n-gram lookup in the text, and verify them in one pass
    draft_from: Sequence[Sequence[int]]  # token ids of earlier outputs to look up too
    on_text: Callable[[str], None]  # called with each text delta, as soon as it is final


def checked(options: GenerateOptions) -> GenerateOptions:
    """The options; TypeError if one does not exist."""
    for name in options:
        if name not in GenerateOptions.__annotations__:
            known = ", ".join(("max_new_tokens", *GenerateOptions.__annotations__))
            raise TypeError(f"there is no option {name!r}; options: {known}")
    return options
