"""The codecs that store a layer by itself, and slots to encode from what `kvfold.testing` has for everybody."""

from __future__ import annotations

from kvfold.codec import Codec
from kvfold.policy.registry import terms
from kvfold.testing.codec import relative_error, sample, slots_like_keys, there_and_back

__all__ = ["CODECS", "relative_error", "sample", "slots_like_keys", "there_and_back"]

CODECS: dict[str, Codec] = {
    term.name: term.variant() for term in terms("codec") if not (term.variant.needs_below or term.variant.needs_basis)
}
