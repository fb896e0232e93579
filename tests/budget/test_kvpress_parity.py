"""Budgets give what NVIDIA kvpress 0.5.5 gives on the same tensors."""

from __future__ import annotations

import pytest

from kvfold.budget import Ada, Budget, select_top
from kvfold.score import KNorm, Scorer, SnapKV
from tests.budget.scores import allocated
from tests.data.compare import assert_same_kept
from tests.data.vectors import Case, cases

SNAPKV = SnapKV(window=8, kernel=5)


@pytest.mark.parametrize(
    ("method", "scorer", "ada"), [("ada_snapkv", SNAPKV, Ada()), ("ada_knorm", KNorm(), Ada(floor=0.5))]
)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_ada_slots(case: Case, method: str, scorer: Scorer, ada: Ada) -> None:
    for layer in range(case.num_layers):
        score_HS = scorer.score(case.view(layer, window=8))
        (count_H,) = allocated(ada, [score_HS], Budget(case.kept, case.num_layers), layer)
        kept_HS, reference_HS = select_top(score_HS, count_H), case.kept_LHT(method)[layer]
        # Heads compete, so with ties the border is one for the whole layer.
        shape = (1, -1) if case.ties else score_HS.shape
        assert_same_kept(kept_HS.view(shape), reference_HS.view(shape), score_HS.view(shape), case.ties)
