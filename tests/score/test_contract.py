"""What every scorer promises, over the whole registry: the rules of `kvfold.testing.check_scorer`."""

from __future__ import annotations

import pytest

from kvfold.policy.registry import terms
from kvfold.score import (
    H2O,
    NACL,
    RKV,
    Chunk,
    Compactor,
    Critical,
    Defensive,
    EpiCache,
    Expected,
    KeyDiff,
    KVzip,
    LagKV,
    LavaScore,
    Scissorhands,
    Scorer,
    SnapKV,
    Tree,
)
from kvfold.testing import check_scorer

VARIANTS: list[Scorer] = [
    SnapKV(window=5, kernel=3, pool="max", over_window="max", over_group="max"),
    SnapKV(window=40, pool="none", over_window="sum", over_group="sum"),
    H2O(correction="mean"),
    Critical(KeyDiff(), first=0.5, epsilon=0.01),
    Defensive(window=5, kernel=3, mass=0.5),
    KVzip(chunk=16, sinks=0),
    EpiCache(window=5),
    LavaScore(window=5, kernel=3),
    Expected(sinks=0, future=7, covariance=False, epsilon=0.01),
    Chunk(KeyDiff(), size=4, shared=False),
    Compactor(sinks=0, recent=1, block=16, blend=0.5),
    LagKV(sinks=2, lag=5),
    LagKV(sinks=0, lag=4, cross=True),
    NACL(proxies=5, share=0.5),
    RKV(window=3, kernel=1, mix=0.5, threshold=0.1),
    Scissorhands(history=6),
    Tree(sinks=0, recent=0.0),
]
SCORERS: list[Scorer] = [term.variant() for term in terms("score")] + VARIANTS


def test_the_scorers_are_registered() -> None:
    names = (
        "a2sf chunk compactor expected fastgen full h2o keydiff knorm kvcompress lagkv nacl random recent rkv"
        " scissorhands snapkv streaming tova tree"
    )
    assert set(names.split()) <= {term.name for term in terms("score")}


@pytest.mark.parametrize("scorer", SCORERS, ids=str)
def test_the_contract(scorer: Scorer) -> None:
    check_scorer(scorer)
