"""What every extractive selector that needs no model guarantees, over every chunker and any text."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import SizeError
from kvfold.policy.registry import load_variants, terms
from kvfold.policy.size import Tokens
from kvfold.shortening.base import Task
from kvfold.shortening.embedders.hashed import HashedTfIdf
from kvfold.shortening.parts import parts_of
from kvfold.shortening.protected import KINDS, kinds_of, protected_parts, protected_spans
from kvfold.shortening.room import Room
from kvfold.shortening.shorten import Shorten, Shortened, shorten_text
from kvfold.shortening.text import plan_of
from kvfold.shortening.tokens import TokenOffsets
from tests.shortening.texts import MARKDOWN, TEXTS, texts

load_variants()
QUESTION = "Where did the ship with grain go, and what is X-42b7?"
SELECTORS = [term.name for term in terms("selector") if term.variant.is_extractive and not term.variant().needs_model]
CHUNKERS = [term.name for term in terms("units")]
SMALL = ["fixed(5, overlap=0.4)", "fixed(1, overlap=0)", "passages(6)", "semantic(6)", "late(6)"]
units = st.sampled_from([*CHUNKERS, *SMALL])
whole_units = units.filter(lambda name: not name.startswith("fixed"))  # it cuts anywhere
sizes = st.sampled_from(["1x", "1.3x", "2x", "4x", "20x", "25%", "7tok", "0.5%"])
by_selector = pytest.mark.parametrize("by", SELECTORS)


def plan(by: str, to: str, units: str, keep: str = "none") -> Shorten:
    return plan_of(by, to, keep, units, "tfidf")


def shortened(text: str, plan: Shorten) -> Shortened:
    return shorten_text(text, plan, question=QUESTION)


def cut_or_told(text: str, wanted: Shorten) -> Shortened:
    """What stays; where no unit fits, what stays of the size that is told, into which one does and below which none."""
    try:
        return shortened(text, wanted)
    except SizeError as error:
        needed = int(re.search(r"no unit of the text fits.* or (\d+)tok$", str(error)).group(1))  # type: ignore[union-attr]
        assert needed > wanted.target(len(TokenOffsets.of(text)))
        with pytest.raises(SizeError, match=f"or {needed}tok"):
            shortened(text, replace(wanted, to=Tokens(needed - 1)))
        found = shortened(text, replace(wanted, to=Tokens(needed)))
        assert found.text.strip()
        return found


def rooms(text: str, plan: Shorten, found: Shortened) -> tuple[Room, Room]:
    """What each unit cost at the beginning, and what it would cost beside all that stays."""
    parts, tokens, embedder = parts_of(text), TokenOffsets.of(text), HashedTfIdf()
    kept_n = protected_parts(text, parts, kinds_of(plan.keep))
    chunks = plan.units.units(text, parts, embedder, tokens)
    task = Task(text, chunks, parts, kept_n, tokens, plan.target(len(tokens)), None, embedder)
    before, after = (Room.of(task, plan.by.avoids_repeats) for _ in range(2))
    is_left = np.zeros(len(text) + 1, dtype=bool)
    for start, end in found.spans:
        is_left[start:end] = True
    after.stays_P = is_left[after.bounds[:-1]]
    after.is_said[after.says_P[after.stays_P]] = True
    after.left = task.target - found.num_tokens
    return before, after


def check_spans(text: str, found: Shortened) -> None:
    assert found.text == "".join(text[start:end] for start, end in found.spans)
    assert all(0 <= start < end <= len(text) for start, end in found.spans)
    assert all(end < start for (_, end), (start, _) in pairwise(found.spans))
    assert found.is_extractive and found.original == text


def check_size(text: str, plan: Shorten, found: Shortened) -> None:
    """At most the target. A unit that is left out does not fit into what is left of it: of those that skip units none
    does, of the others the next does not."""
    tokens = TokenOffsets.of(text)
    assert found.num_original_tokens == len(tokens)
    assert found.num_tokens == sum(tokens.count(*span) for span in found.spans) <= plan.target(len(tokens))
    before, after = rooms(text, plan, found)
    missing = [unit for unit in range(len(before.first_N)) if after.cost(unit)]
    fits = [unit for unit in missing if before.cost(unit) <= after.left]
    assert not fits if plan.by.skips else not missing or len(fits) < len(missing)


@by_selector
@settings(max_examples=30, deadline=None)
@given(text=texts(), units=units, to=sizes)
def test_spans_of_the_text_in_order_within_one_unit_of_the_size(by: str, text: str, units: str, to: str) -> None:
    wanted = plan(by, to, units)
    found = cut_or_told(text, wanted)
    check_spans(text, found)
    check_size(
        text, replace(wanted, to=Tokens(max(1, found.num_tokens, wanted.target(found.num_original_tokens)))), found
    )
    assert found.spans == cut_or_told(text, wanted).spans


@by_selector
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_every_layout_and_script(by: str, text: str) -> None:
    for units in (*CHUNKERS, *SMALL):
        wanted = plan(by, "3x", units)
        found = cut_or_told(text, wanted)
        check_spans(text, found)
        check_size(
            text, replace(wanted, to=Tokens(max(1, found.num_tokens, wanted.target(found.num_original_tokens)))), found
        )


@by_selector
@settings(max_examples=20, deadline=None)
@given(text=texts(), units=units)
def test_at_one_x_the_text_comes_back(by: str, text: str, units: str) -> None:
    for to in ("1x", "100%", f"{max(1, len(TokenOffsets.of(text)))}tok"):
        found = shortened(text, plan(by, to, units, "all"))
        assert found.text == text and found.num_tokens == found.num_original_tokens


@by_selector
@settings(max_examples=30, deadline=None)
@given(text=texts(), units=units, to=sizes, keep=st.sampled_from(["all", *KINDS, "headings, ids, urls"]))
def test_what_must_stay_does_or_the_number_of_its_tokens_is_told(
    by: str, text: str, units: str, to: str, keep: str
) -> None:
    parts, kinds = parts_of(text), kinds_of(keep)
    must = protected_spans(text, kinds)
    must += [
        (part.start, part.end)
        for part in parts
        if (part.kind == "code" and "code" in kinds) or (part.kind == "heading" and "headings" in kinds)
    ]
    try:
        found = shortened(text, plan(by, to, units, keep))
    except SizeError as error:
        needed, ratio = re.search(r"shorten to ([\d.]+)x or (\d+)tok", str(error)).group(2, 1)  # type: ignore[union-attr]
        found = shortened(text, plan(by, f"{needed}tok", units, keep))
        assert found.num_tokens <= int(needed)
        if "no unit of the text fits" in str(error):
            return
        assert f" is {needed} tokens" in str(error)
        assert shortened(text, plan(by, f"{ratio}x", units, keep)).num_tokens >= int(needed)
        if int(needed) > 1:
            with pytest.raises(SizeError, match=f"is {needed} tokens"):
                shortened(text, plan(by, f"{int(needed) - 1}tok", units, keep))
    check_spans(text, found)
    for low, high in must:
        assert any(start <= low and high <= end for start, end in found.spans)


@by_selector
@settings(max_examples=30, deadline=None)
@given(text=texts(), units=whole_units, to=sizes, keep=st.sampled_from(["none", "headings", "code"]))
def test_what_begins_a_line_still_does(by: str, text: str, units: str, to: str, keep: str) -> None:
    with suppress(SizeError):
        found = shortened(text, plan(by, to, units, keep))
        begins, done = set(), 0
        for start, end in found.spans:
            begins |= {(at, done + at - start) for at in range(start, end)}
            done += end - start
        lines = {part.start for part in parts_of(text) if part.kind != "sentence"}
        for at, now in begins:
            assert at not in lines or not found.text[:now].strip() or found.text[:now].rstrip(" \t").endswith("\n")


@pytest.mark.parametrize("by", ("head", "tail", "ends"))
@settings(max_examples=30, deadline=None)
@given(text=texts(), units=units, to=sizes)
def test_truncation_keeps_nothing_between(by: str, text: str, units: str, to: str) -> None:
    spans = cut_or_told(text, plan(by, to, units)).spans
    ends = {"head": ("start",), "tail": ("end",), "ends": ("start", "end")}[by]
    joined: list[tuple[int, int]] = []  # over white space that was left out
    for start, end in spans:
        begin = joined.pop()[0] if joined and not text[joined[-1][1] : start].strip() else start
        joined.append((begin, end))
    assert all((start == 0 and "start" in ends) or (end == len(text) and "end" in ends) for start, end in joined)


def test_all_are_here() -> None:
    assert set(SELECTORS) == {"graph", "rank", "keyphrases", "head", "tail", "ends", "shuffle"}
    assert set(CHUNKERS) == {"auto", "sentences", "passages", "fixed", "semantic", "late"}


def test_a_share_is_rounded_up() -> None:
    num_tokens = len(TokenOffsets.of(MARKDOWN))
    for to, share in (("3x", 1 / 3), ("25%", 0.25), ("0.5%", 0.005)):
        assert plan("graph", to, "sentences").target(num_tokens) == math.ceil(share * num_tokens)
