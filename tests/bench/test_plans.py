"""Plans name policies that there are, each at every size, and leave no method of the registry out."""

from __future__ import annotations

import pytest

from kvfold.bench.plans import PLANS, find_plan, scorers
from kvfold.bench.sweep import jobs
from kvfold.errors import InputError
from kvfold.policy.policy import Policy
from kvfold.policy.registry import term_of, terms

TRAINED = {"aqua", "learned", "palu", "profile"}  # they need a file of the model's own
ELSEWHERE = {"when", "protect"}  # not what a prompt that is compressed once is compared by


@pytest.mark.parametrize("name", PLANS)
def test_policies_of_a_plan_are_valid_and_differ(name: str) -> None:
    plan = PLANS[name]
    found = jobs(plan.policies(), plan.sizes, plan.modes)
    assert len({Policy.parse(job.text).fingerprint for job in found}) == len(found) / len(plan.modes)


def test_every_scorer_that_needs_no_training_takes_part() -> None:
    assert {*scorers(), "full", "learned"} == {term.name for term in terms("score")}


def test_methods_leave_no_term_out() -> None:
    plan = PLANS["methods"]
    policies = [Policy.parse(job.text) for job in jobs(plan.policies(), plan.sizes[:1])]
    used = {term_of(variant).name for policy in policies for variant in policy.variants}
    assert {term.name for term in terms() if term.axis not in ELSEWHERE} - used == TRAINED


def test_unknown_plan() -> None:
    with pytest.raises(InputError, match=r'no plan "nonsense"; plans: scorers, few'):
        find_plan("nonsense")
