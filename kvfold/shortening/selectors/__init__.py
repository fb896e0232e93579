"""Which units of a text stay: one file per selector."""

from kvfold.shortening.selectors import graph, rank, truncation

__all__ = ["graph", "rank", "truncation"]
