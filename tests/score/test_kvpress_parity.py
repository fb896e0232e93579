"""Scorers select what NVIDIA kvpress 0.5.5 selects on the same tensors."""

from __future__ import annotations

import pytest

from kvfold.budget import Budget, Uniform, select_top
from kvfold.score import TOVA, Expected, KeyDiff, KNorm, Scorer, SnapKV
from tests.budget.scores import allocated
from tests.data.compare import assert_same_kept
from tests.data.vectors import Case, cases, metadata

SCORERS: dict[str, Scorer] = {
    "knorm": KNorm(),
    "keydiff": KeyDiff(),
    "tova": TOVA(),
    "snapkv": SnapKV(window=8, kernel=5),
    "expected": Expected(sinks=4, future=32, epsilon=1e-2),
    "expected_mean": Expected(sinks=4, future=32, covariance=False, vnorm=False),
}


@pytest.mark.parametrize("method", SCORERS)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_same_slots_as_kvpress(case: Case, method: str) -> None:
    scorer = SCORERS[method]
    for layer in range(case.num_layers):
        score_HS = scorer.score(case.view(layer, max(1, scorer.needs.last_queries)))
        (count_H,) = allocated(Uniform(), [score_HS], Budget(case.kept, case.num_layers), layer)
        assert_same_kept(select_top(score_HS, count_H), case.kept_LHT(method)[layer], score_HS, case.ties)


def test_vectors_say_where_they_come_from() -> None:
    provenance = metadata("provenance")
    assert provenance["packages"]["kvpress"] == "0.5.5"
    assert provenance["settings"] == {"window": 8, "kernel": 5, "future": 32, "sinks": 4, "seed": 0}


def test_vectors_cover_groups_scaled_rope_and_ties() -> None:
    by_name = {case.name: case for case in cases()}
    groups = {name: case.tensor("q_LQTD").shape[1] // case.num_kv_heads for name, case in by_name.items()}
    assert groups == {"pairs": 2, "triples": 3, "yarn": 2, "ties": 2}
    assert by_name["yarn"].tensor("attention_scale") > 1
    k_HTD = by_name["ties"].tensor("k_LHTD")[0]
    assert len({tuple(k_D) for k_D in k_HTD[0].tolist()}) < k_HTD.shape[1]
