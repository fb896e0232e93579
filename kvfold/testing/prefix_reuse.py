"""Read a prompt over what a store has of it, and leave there what is new: for tests and benchmarks of stores and tiers.

The prompt is read up to each place where something is to be saved, saved there, and read on: chunk borders are
absolute, so this is the run that would have been without a store. A compressed prefix is compressed once, at its
marker, and what follows the last marker (the question) is kept whole, whether the prefix was found or computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from kvfold.engine.layer_major import Progress
from kvfold.engine.runner import Runner
from kvfold.errors import PrefixLost
from kvfold.pages.sequence import SequenceCache
from kvfold.store.events import Reason
from kvfold.store.prefixes import Hit, Prefixes, Ttl

MOST_LOST = 3  # times that a prompt begins with a prefix which is lost on its way


@dataclass(frozen=True)
class Read:
    """A prompt that was read: its sequence is the caller's, `logits_V` follow its last token."""

    sequence: SequenceCache
    logits_V: Tensor
    matched_tokens: int  # found, from `tier` or faster ones
    saved_tokens: int  # that the next request can find
    tier: str | None
    miss: Reason | None


def prefill_reusing(
    runner: Runner,
    prefixes: Prefixes,
    tokens: Sequence[int],
    *,
    markers: Sequence[int] | None = None,
    ttl: Ttl = "5m",
    at: float | None = None,
    progress: Progress | None = None,
) -> Read:
    """`markers` are the lengths whose prefixes other prompts may share; where chunks are stored every whole chunk up to
    the last marker (without markers: of the prompt) is, too. Without markers a policy that compresses does so at the
    end of the prompt, over nothing that was stored. Raises what a prefill raises, with nothing held.

    What is lost on its way is looked up again, a few times; then the whole prompt is computed."""
    markers = [] if markers is None and not prefixes.has_chunks else markers
    for _ in range(MOST_LOST):
        hit = prefixes.lookup(tokens, markers=markers, at=at, wait=False)
        with suppress(PrefixLost):
            return _read_behind(hit, runner, prefixes, tokens, markers, ttl, at, progress)
    nothing = Hit(prefixes.empty(), 0, None, "corrupt")
    return _read_behind(nothing, runner, prefixes, tokens, markers, ttl, at, progress)


def _read_behind(
    hit: Hit,
    runner: Runner,
    prefixes: Prefixes,
    tokens: Sequence[int],
    markers: Sequence[int] | None,
    ttl: Ttl,
    at: float | None,
    progress: Progress | None,
) -> Read:
    """What was not found; PrefixLost, with nothing held, if not all that was found can be read."""
    sequence, saved = hit.sequence, hit.matched_tokens
    stops = [stop for stop in prefixes.save_lengths(len(tokens), markers) if stop > hit.matched_tokens]
    try:
        for stop in stops:
            runner.prefill([sequence], [tokens[sequence.committed_len : stop]], progress=progress)
            cuts = prefixes.save_lengths(len(tokens), markers)
            saved = prefixes.save(sequence, tokens, upto=stop, cuts=cuts, ttl=ttl, at=at)
        rest, whole = tokens[sequence.committed_len :], not prefixes.has_chunks and bool(sequence.committed_len)
        logits = runner.prefill([sequence], [rest], compress=not whole, progress=progress)[0]
    except BaseException:
        sequence.release()
        raise
    return Read(sequence, logits, hit.matched_tokens, saved, hit.tier, hit.miss)
