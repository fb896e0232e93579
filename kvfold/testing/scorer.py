"""The contract of a scorer (kvfold/score/base.py).

R rows   S slots
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from kvfold.budget.select import select_top
from kvfold.errors import InputError
from kvfold.score.base import Needs, Scorer, View
from kvfold.testing.rules import attempt, require, require_docstring, require_term
from kvfold.testing.views import HEADS, make_view, sequence

# Two long sequences and a short one; heads of one sequence hold different slots.
SEEN, LENS = (90, 20, 61), (60, 44, 20, 17, 61, 9)


def check_scorer(scorer: Scorer) -> None:
    """AssertionError, with the rule as its text, if a scorer breaks its contract."""
    require_term(scorer, Scorer)
    view = make_view(SEEN, LENS, scorer.needs)
    _scores_are_fp32_and_padding_is_minus_infinity(scorer, view)
    _the_view_is_left_as_it_was(scorer)
    _scores_are_repeatable(scorer, view)
    _padding_does_not_matter(scorer, view)
    _a_batch_equals_single_runs(scorer, view)
    _size_matters_only_where_that_is_said(scorer, view)
    _a_single_slot_can_be_scored(scorer)
    _a_missing_part_is_named(scorer)
    require_docstring(scorer)


def _scores_are_fp32_and_padding_is_minus_infinity(scorer: Scorer, view: View) -> None:
    in_bf16 = replace(view, k_RSD=view.k_RSD.bfloat16(), v_RSD=view.v_RSD.bfloat16())
    for given in (view, in_bf16):
        rule = f"keys and values in {str(given.k_RSD.dtype).removeprefix('torch.')} must be scored"
        score_RS = attempt(partial(_scored, scorer), given, rule=rule)
        require(isinstance(score_RS, Tensor), "score must return a tensor")
        require(score_RS.dtype == torch.float32, f"scores must be float32, not {score_RS.dtype}; see View.masked")
        shape, wanted = list(score_RS.shape), list(view.valid_RS.shape)
        require(shape == wanted, f"scores must have the shape [rows, slots] {wanted}, not {shape}")
        require(not score_RS.isnan().any(), "scores must not be NaN")
        require((score_RS[~view.valid_RS] == -torch.inf).all(), "scores of padding must be -inf; see View.masked")
        require((score_RS[view.valid_RS] > -torch.inf).all(), "scores of stored slots must be above -inf")


def _scored(scorer: Scorer, view: View) -> Tensor:
    """Scores; a part that is None because nobody asked for it is named."""
    try:
        return scorer.score(view)
    except (AttributeError, TypeError) as error:
        if "NoneType" not in str(error):
            raise
        missing = [field.name for field in fields(view) if getattr(view, field.name) is None]
        raise InputError(
            f"{error}; these parts of the view are None unless `needs` declares them: {', '.join(missing)}"
        ) from error


def _scores_are_repeatable(scorer: Scorer, view: View) -> None:
    rule = "the same view must get the same scores every time; draw random numbers from a seed that is an argument"
    require(torch.equal(scorer.score(view), scorer.score(view)), rule)


def _the_view_is_left_as_it_was(scorer: Scorer) -> None:
    view = make_view(SEEN, LENS, scorer.needs)
    parts = {field.name: getattr(view, field.name) for field in fields(view)}
    before = {name: part.clone() for name, part in parts.items() if isinstance(part, Tensor)}
    scorer.score(view)
    for name, part in before.items():
        require(torch.equal(getattr(view, name), part), f"score must not write to the view; it changed view.{name}")


def _padding_does_not_matter(scorer: Scorer, view: View) -> None:
    pad_RS1 = ~view.valid_RS.unsqueeze(-1)
    k_RSD, v_RSD = view.k_RSD.masked_fill(pad_RS1, torch.nan), view.v_RSD.masked_fill(pad_RS1, 1e30)
    found = scorer.score(replace(view, k_RSD=k_RSD, v_RSD=v_RSD))
    rule = "keys and values in the padding (view.valid_RS is False) must not change any score"
    require(torch.equal(found, scorer.score(view)), rule)


def _a_batch_equals_single_runs(scorer: Scorer, view: View) -> None:
    score_RS = scorer.score(view)
    for index in range(len(SEEN)):
        alone = sequence(view, index)
        alone_RS = scorer.score(alone)
        rows_RS = score_RS[index * HEADS : (index + 1) * HEADS, : alone_RS.shape[1]]
        rule = "a sequence must get the same scores in a batch as alone, and every time"
        require(torch.allclose(rows_RS, alone_RS, rtol=1e-6, atol=1e-7), rule)
        half_R = (alone.len_R + 1) // 2
        require(torch.equal(select_top(rows_RS, half_R), select_top(alone_RS, half_R)), f"{rule}: other slots are kept")


def _size_matters_only_where_that_is_said(scorer: Scorer, view: View) -> None:
    few, many = (scorer.score(replace(view, slots_per_head=slots)) for slots in (6, 16))
    rule = "scores that depend on view.slots_per_head must say so: needs = Needs(size=True)"
    require(scorer.needs.size or torch.equal(view.masked(few), view.masked(many)), rule)


def _a_single_slot_can_be_scored(scorer: Scorer) -> None:
    view = make_view((1,), (1, 1), scorer.needs)
    score_RS = attempt(scorer.score, view, rule="a prompt of one token must be scored")
    rule = "the score of a single slot must be a number"
    require(list(score_RS.shape) == [HEADS, 1] and not score_RS.isnan().any(), rule)


def _a_missing_part_is_named(scorer: Scorer) -> None:
    of_view = replace(scorer.needs, sinks=0, recent=0, keeps_window=True, size=False, end_of_prompt=False)
    if of_view == Needs():
        return
    rule = "a part of the view that is missing must be an InputError that names it (kvfold.score.base.given)"
    try:
        scorer.score(make_view((30,), (30, 30), Needs()))
    except InputError as error:
        require("needs view." in str(error), rule)
    except Exception as error:
        raise AssertionError(f"{rule}; it raised {type(error).__name__}") from error
    else:
        raise AssertionError(f"{rule}; it did without")
