"""Scores that break the contract of a scorer stop the round that asked for them, by name, and store nothing.

R rows   S slots
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score import Scorer, View
from tests.pages.tiny import fill, new_sequence, step, tiny_spec

SPEC = tiny_spec(num_layers=2, num_heads=3)
Score = Callable[[Tensor, View], Any]
BROKEN: dict[str, tuple[Score, str]] = {
    "nan": (
        lambda score_RS, view: score_RS * torch.nan,
        "scores of broken are NaN, or -inf for a stored slot, in layer 0",
    ),
    "one_nan": (lambda score_RS, view: score_RS.masked_fill(view.position_RS == 9, torch.nan), "are NaN"),
    "minus_inf": (lambda score_RS, view: score_RS.masked_fill(view.position_RS == 9, -torch.inf), "for a stored slot"),
    "one_column": (
        lambda score_RS, view: score_RS[:, :1],
        r"of broken must .* \[rows, slots\] \[3, 60\], not \[3, 1\]",
    ),
    "one_row": (lambda score_RS, view: score_RS[0], r"not \[60\]"),
    "broadcast": (lambda score_RS, view: view.masked(score_RS[:, :1]), r"\[3, 60\], not \[3, 1\]"),
    "list": (lambda score_RS, view: score_RS.tolist(), "not list"),
}


@pytest.fixture
def broken(own_terms: None, request: pytest.FixtureRequest) -> None:
    function = BROKEN[request.param][0]

    @register("score", "broken")
    @dataclass(frozen=True)
    class Broken(Scorer):
        """Is broken."""

        def score(self, view: View) -> Tensor:
            found: Tensor = function(view.k_RSD.float().norm(dim=-1), view)
            return found


@pytest.mark.parametrize(
    "policy", ["broken + 3x", "chunk(broken, 4) + 3x", "critical(broken) + 3x", "broken + global + 3x"]
)
@pytest.mark.parametrize(("broken", "rule"), [(name, rule) for name, (_, rule) in BROKEN.items()], indirect=["broken"])
def test_broken_scores_stop_a_prefill(broken: None, rule: str, policy: str) -> None:
    sequence = new_sequence(f"{policy} + protect(sinks=2, recent=3)", SPEC)
    with pytest.raises(PolicyError, match=rule):
        fill(sequence, 60)
    assert sequence.sealed_len == 0
    sequence.release()


@pytest.mark.parametrize("broken", ["nan"], indirect=True)
def test_broken_scores_stop_an_eviction_while_decoding(broken: None) -> None:
    sequence = new_sequence("broken + 20tok + protect(sinks=2, recent=3)", SPEC)
    fill(sequence, 12)
    with pytest.raises(PolicyError, match="scores of broken are NaN"):
        for _ in range(40):
            step(sequence)
    sequence.release()
