"""Which embedder a name means. `auto` is the static vectors if they were pulled, else TF-IDF."""

from __future__ import annotations

from kvfold.errors import PolicyError
from kvfold.shortening.base import Embedder
from kvfold.shortening.embedders.hashed import HashedTfIdf

NAMES = ("auto", "tfidf")


def load_embedder(name: str) -> Embedder:
    """The embedder of a name."""
    if name in ("auto", "tfidf"):
        return HashedTfIdf()
    raise PolicyError(f'no embedder "{name}"; embedders: {", ".join(NAMES)}')
