"""Suites name policies that there are, once each, and leave no method of the registry out."""

from __future__ import annotations

import pytest

from kvfold.bench.sizes import cells
from kvfold.bench.suites import METHODS, SUITES, Suite
from kvfold.policy.policy import Policy
from kvfold.policy.registry import term_of, terms

MEASURED = {"aqua", "profile", "palu"}  # they name a file of the model's own
ELSEWHERE = {"when", "protect"}  # not what a prompt that is compressed once is compared by


def _parsed(suite: Suite) -> list[Policy]:
    found = {cell.policy: cell.as_written for cell in cells(suite.policies(), suite.memories)}
    return [Policy.parse(policy if as_written else f"{policy} + 1x") for policy, as_written in found.items()]


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_policies_are_valid_and_differ(suite: Suite) -> None:
    assert len({policy.fingerprint for policy in _parsed(suite)}) == len(suite.policies()) + 1  # and the full cache


def test_methods_leave_no_term_out() -> None:
    used = {term_of(variant).name for policy in _parsed(METHODS) for variant in policy.variants}
    assert {term.name for term in terms() if term.axis not in ELSEWHERE} - used == MEASURED
