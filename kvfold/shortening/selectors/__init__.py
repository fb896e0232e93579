"""Which units of a text stay: one file per selector."""

from kvfold.shortening.selectors import graph, keyphrases, rank, topics, truncation, words

__all__ = ["graph", "keyphrases", "rank", "topics", "truncation", "words"]
