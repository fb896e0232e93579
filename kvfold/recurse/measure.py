"""What compression, sharing and drafts did, measured on some parts of a text that are read again, each way in turn.

as it was read        forks of the shared prefix, in batches, under the policy
baseline              the full cache, one call at a time, nothing shared
without drafts        as it was read, where that was with drafts

quality_retention     how many parts have the same answer as with the baseline
throughput_gain       seconds of the baseline, by seconds as it was read
speculative_speedup   decoding seconds per token without drafts, by those with drafts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvfold.policy.policy import Policy
from kvfold.recurse.calls import Prompt
from kvfold.recurse.journal import Recorded
from kvfold.recurse.pieces import Piece
from kvfold.recurse.reader import Reader
from kvfold.recurse.result import KVFacts
from kvfold.recurse.usage import Usage


def measured(reader: Reader, kv: KVFacts, count: int) -> KVFacts:
    """The facts with what `count` parts tell, evenly spread over the text."""
    count = min(count, len(reader.pieces))
    pieces = [reader.pieces[at * len(reader.pieces) // count] for at in range(count)]
    prompts = [reader.reading.prompt(piece.text) for piece in pieces]
    calls, width = reader.calls, reader.calls.width
    read, usage = _asked(reader, calls.policy, prompts, width=width, speculate=calls.speculate)
    plain, base = _asked(reader, "full", prompts, width=1, shares=False)
    same = [
        _answer(reader, piece, one) == _answer(reader, piece, other)
        for piece, one, other in zip(pieces, read, plain, strict=True)
    ]
    speedup = None
    if calls.speculate:
        _, undrafted = _asked(reader, calls.policy, prompts, width=width)
        speedup = _step_s(undrafted) / _step_s(usage)
    gain = base.seconds / max(usage.seconds, 1e-9)
    return replace(kv, quality_retention=sum(same) / count, throughput_gain=gain, speculative_speedup=speedup)


def _asked(
    reader: Reader,
    policy: str | Policy,
    prompts: Sequence[Prompt],
    *,
    width: int,
    shares: bool = True,
    speculate: bool | int = False,
) -> tuple[list[str], Usage]:
    """Replies and what they cost, the prefix included."""
    model = reader.calls.model
    with reader.reading.calls(model, policy, width=width, shares=shares, speculate=speculate) as calls:
        return [reply.text for reply in calls.ask_batch(prompts)], calls.usage


def _answer(reader: Reader, piece: Piece, reply: str) -> tuple[str, str]:
    node = piece.node(reader.context, reader.question, Recorded(reply, 0))
    return node.state, node.answer.casefold()


def _step_s(usage: Usage) -> float:
    return max(usage.decode_s, 1e-9) / max(usage.tokens_generated, 1)
