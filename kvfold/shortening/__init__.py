"""Shorten text before it is read: units of a text, selectors that say which stay, and embedders that compare them."""

from kvfold.shortening import chunkers, selectors, shorten

__all__ = ["chunkers", "selectors", "shorten"]
