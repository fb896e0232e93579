"""Generation options and the reply of `Session.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from kvfold.engine.output_processor import Request, StopReason
from kvfold.stats import Stats


@dataclass(frozen=True)
class Reply:
    """The result of a generation.

    Attributes:
        text: The text, without a stop string.
        token_ids: Its tokens.
        reason: Why it ended: an end token, a stop string, or the number of tokens.
        stats: Sizes and times after it.
        decode_ms: Mean inter-token latency in milliseconds.
    """

    text: str
    token_ids: list[int]
    reason: StopReason
    stats: Stats
    decode_ms: float

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
    """Options of `Session.generate`, `Session.ask` and `kvfold.answer`.

    Attributes:
        temperature: 0, the default, is greedy.
        top_k: Sample from so many tokens; 0, the default, from all.
        top_p: Sample from the most likely tokens of this total probability; default 1.
        seed: Of sampling; default 0.
        stop: Stop strings; they are cut off.
        speculate: Draft by n-gram lookup in the text, up to so many tokens, and verify drafts in one pass.
        draft_from: Token ids of earlier outputs to look drafts up in, too.
        on_text: Called with each text delta, as soon as it is final.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: Sequence[str]
    speculate: bool | int
    draft_from: Sequence[Sequence[int]]
    on_text: Callable[[str], None]


def checked(options: GenerateOptions) -> GenerateOptions:
    """The options; TypeError if one does not exist."""
    for name in options:
        if name not in GenerateOptions.__annotations__:
            known = ", ".join(("max_new_tokens", *GenerateOptions.__annotations__))
            raise TypeError(f"there is no option {name!r}; options: {known}")
    return options
