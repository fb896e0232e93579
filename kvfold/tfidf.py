"""What pieces of text are about, by their words: TF-IDF vectors, their clusters, and the cluster a question belongs to.

A word counts by how rare it is among the pieces: tf * (ln((1 + n) / (1 + pieces with it)) + 1), vectors of length 1.
Clusters are spherical k-means from starting points as far apart as can be (the first is the piece nearest to the mean
of all), so there is no chance in them: the same pieces give the same clusters.

    N pieces   W words   E clusters
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

_ROUNDS = 50  # clusters of a conversation settle in a few


@dataclass(frozen=True)
class Words:
    """The words of some pieces, and how much each counts."""

    index: dict[str, int]
    idf_W: Tensor

    @classmethod
    def of(cls, pieces: Sequence[str]) -> Words:
        held = Counter(word for piece in pieces for word in set(_words(piece)))
        index = {word: i for i, word in enumerate(sorted(held))}
        idf = [math.log((1 + len(pieces)) / (1 + held[word])) + 1 for word in index]
        return cls(index, torch.tensor(idf, dtype=torch.float64))

    def vectors(self, pieces: Sequence[str]) -> Tensor:
        """fp64 [N, W] of length 1; 0 for a piece of no known word."""
        found_NW = torch.zeros(len(pieces), len(self.index), dtype=torch.float64)
        for row, piece in enumerate(pieces):
            for word, count in Counter(_words(piece)).items():
                if word in self.index:
                    found_NW[row, self.index[word]] = count
        return normalize(found_NW * self.idf_W, dim=-1)


@dataclass(frozen=True)
class Topics:
    """Clusters of pieces."""

    words: Words
    piece_NW: Tensor
    label_N: Tensor  # the cluster of each piece
    centre_EW: Tensor  # of length 1

    @classmethod
    def of(cls, pieces: Sequence[str], count: int) -> Topics:
        """At most `count` clusters; fewer where there are fewer different pieces."""
        words = Words.of(pieces)
        piece_NW = words.vectors(pieces)
        centre_EW = _starts(piece_NW, count)
        label_N = (piece_NW @ centre_EW.T).argmax(-1)
        for _ in range(_ROUNDS):
            total_EW = torch.zeros_like(centre_EW).index_add(0, label_N, piece_NW)
            centre_EW = torch.where(total_EW.any(-1, keepdim=True), normalize(total_EW, dim=-1), centre_EW)
            before_N, label_N = label_N, (piece_NW @ centre_EW.T).argmax(-1)
            if label_N.equal(before_N):
                break
        return cls(words, piece_NW, label_N, centre_EW)

    @property
    def count(self) -> int:
        return len(self.centre_EW)

    def medoids(self, cluster: int, count: int) -> list[int]:
        """The pieces of a cluster that are nearest to its centre, in the order of the text."""
        near_N = (self.piece_NW @ self.centre_EW[cluster]).masked_fill(self.label_N != cluster, -1.0)
        mine = int((self.label_N == cluster).sum())
        return sorted(near_N.topk(min(count, mine)).indices.tolist())

    def nearest(self, text: str) -> int:
        """The cluster a text belongs to; the largest one if they share no word."""
        near_E = self.centre_EW @ self.words.vectors([text])[0]
        if not near_E.any():
            return int(self.label_N.bincount(minlength=self.count).argmax())
        return int(near_E.argmax())


def _starts(piece_NW: Tensor, count: int) -> Tensor:
    """Pieces to start from: the one nearest to the mean, then always the one that is farthest from those taken."""
    taken = [int((piece_NW @ piece_NW.mean(0)).argmax())]
    while len(taken) < count:
        near_N = (piece_NW @ piece_NW[taken].T).amax(-1)
        if float(near_N.min()) > 1 - 1e-9:
            break
        taken.append(int(near_N.argmin()))
    return piece_NW[taken]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
