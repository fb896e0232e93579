"""How a text is parted into units: one file per chunker."""

from kvfold.shortening.chunkers import auto, fixed, late, passages, semantic, sentences

__all__ = ["auto", "fixed", "late", "passages", "semantic", "sentences"]
