"""TF-IDF vectors of texts, their clusters by spherical k-means, and the nearest cluster of a question.

Weight of a word: tf * (ln((1 + n) / (1 + texts with it)) + 1); vectors have length 1. K-means starts from the text
nearest to the mean, then always from the one farthest from those taken, so clusters are deterministic.

    N texts   W words   E clusters
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

_ROUNDS = 50  # at most; clusters of a conversation converge in a few


@dataclass(frozen=True)
class Vocabulary:
    """The words of some texts and their inverse document frequencies."""

    index: dict[str, int]
    idf_W: Tensor

    @classmethod
    def of(cls, texts: Sequence[str]) -> Vocabulary:
        held = Counter(word for text in texts for word in set(_words(text)))
        index = {word: i for i, word in enumerate(sorted(held))}
        idf = [math.log((1 + len(texts)) / (1 + held[word])) + 1 for word in index]
        return cls(index, torch.tensor(idf, dtype=torch.float64))

    def vectors(self, texts: Sequence[str]) -> Tensor:
        """TF-IDF vectors, fp64 [N, W] of length 1; 0 for a text without known words."""
        found_NW = torch.zeros(len(texts), len(self.index), dtype=torch.float64)
        for row, text in enumerate(texts):
            for word, count in Counter(_words(text)).items():
                if word in self.index:
                    found_NW[row, self.index[word]] = count
        return normalize(found_NW * self.idf_W, dim=-1)


@dataclass(frozen=True)
class Topics:
    """Clusters of texts."""

    words: Vocabulary
    text_NW: Tensor
    label_N: Tensor  # the cluster of each text
    centre_EW: Tensor  # of length 1

    @classmethod
    def of(cls, texts: Sequence[str], count: int) -> Topics:
        """At most `count` clusters; fewer where there are fewer different texts."""
        words = Vocabulary.of(texts)
        text_NW = words.vectors(texts)
        centre_EW = _starts(text_NW, count)
        label_N = (text_NW @ centre_EW.T).argmax(-1)
        for _ in range(_ROUNDS):
            total_EW = torch.zeros_like(centre_EW).index_add(0, label_N, text_NW)
            centre_EW = torch.where(total_EW.any(-1, keepdim=True), normalize(total_EW, dim=-1), centre_EW)
            before_N, label_N = label_N, (text_NW @ centre_EW.T).argmax(-1)
            if label_N.equal(before_N):
                break
        return cls(words, text_NW, label_N, centre_EW)

    @property
    def count(self) -> int:
        return len(self.centre_EW)

    def medoids(self, cluster: int, count: int) -> list[int]:
        """Indices of the `count` texts of a cluster that are nearest to its centre, ascending."""
        near_N = (self.text_NW @ self.centre_EW[cluster]).masked_fill(self.label_N != cluster, -1.0)
        mine = int((self.label_N == cluster).sum())
        return sorted(near_N.topk(min(count, mine)).indices.tolist())

    def nearest(self, text: str) -> int:
        """The nearest cluster of a text; the largest one if they share no word."""
        near_E = self.centre_EW @ self.words.vectors([text])[0]
        if not near_E.any():
            return int(self.label_N.bincount(minlength=self.count).argmax())
        return int(near_E.argmax())


def _starts(text_NW: Tensor, count: int) -> Tensor:
    """Initial centres: the text nearest to the mean, then always the one farthest from those taken."""
    taken = [int((text_NW @ text_NW.mean(0)).argmax())]
    while len(taken) < count:
        near_N = (text_NW @ text_NW[taken].T).amax(-1)
        if float(near_N.min()) > 1 - 1e-9:
            break
        taken.append(int(near_N.argmin()))
    return text_NW[taken]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
