"""Views to score, from what `kvfold.testing` has for everybody."""

from kvfold.testing.views import GROUP, HEAD_DIM, HEADS, HIDDEN, SPEC, make_view, sequence

__all__ = ["GROUP", "HEADS", "HEAD_DIM", "HIDDEN", "SPEC", "make_view", "sequence"]
