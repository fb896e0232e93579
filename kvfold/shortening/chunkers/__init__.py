"""How a text is parted into units: one file per chunker."""

from kvfold.shortening.chunkers import fixed, late, passages, semantic, sentences

__all__ = ["fixed", "late", "passages", "semantic", "sentences"]
