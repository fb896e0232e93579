"""How a text is parted into units: one file per chunker."""

from kvfold.shortening.chunkers import sentences

__all__ = ["sentences"]
