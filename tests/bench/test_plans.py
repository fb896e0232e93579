"""Plans name policies that there are, each at every size."""

from __future__ import annotations

import pytest

from kvfold.bench.methods import scores
from kvfold.bench.plans import PLANS, find_plan
from kvfold.bench.sweep import jobs
from kvfold.errors import InputError
from kvfold.policy.policy import Policy
from kvfold.policy.registry import terms


@pytest.mark.parametrize("name", PLANS)
def test_policies_of_a_plan_are_valid_and_differ(name: str) -> None:
    plan = PLANS[name]
    found = jobs(plan.policies(), plan.sizes, plan.modes)
    assert len({Policy.parse(job.text).fingerprint for job in found}) == len(found) / len(plan.modes)


def test_every_scorer_that_needs_no_training_takes_part() -> None:
    assert {*scores(), "full", "learned"} == {term.name for term in terms("score")}


def test_unknown_plan() -> None:
    with pytest.raises(InputError, match=r'no plan "nonsense"; plans: scorers, few'):
        find_plan("nonsense")
