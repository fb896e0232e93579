"""Which units of a text stay: one file per selector."""

from kvfold.shortening.selectors import graph, rank, topics, truncation, words

__all__ = ["graph", "rank", "topics", "truncation", "words"]
