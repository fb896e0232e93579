"""Rewriting: what has to change and what must not, and the score of a copy."""

from __future__ import annotations

import pytest

from kvfold.bench.workloads import Sample
from kvfold.bench.workloads.rewrite import NUM_EDITS, Rewrite, share
from tests.bench.workloads.tokens import setting, trained

FACTS = {"edits": ("Now a.", "Now b."), "kept": ("Still c.", "Still d.")}
SAMPLE = Sample("rename", 0, "", "", ("Now a. Still c. Now b. Still d.",), 8, facts=FACTS)


def sentences(sample: Sample, which: str) -> tuple[str, ...]:
    found = sample.facts[which]
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("task", Rewrite.tasks)
def test_the_text_lacks_every_edit_and_holds_every_fact(task: str) -> None:
    sample = Rewrite().sample(setting(1200), task, 0)
    edits, kept = sentences(sample, "edits"), sentences(sample, "kept")
    assert len(set(edits)) == len(set(kept)) == NUM_EDITS
    assert not any(edit in sample.context for edit in edits)
    assert all(fact in sample.context for fact in kept)
    assert Rewrite().score(sample, sample.context) == 0  # a mere copy


@pytest.mark.parametrize("task", Rewrite.tasks)
def test_the_perfect_reply_differs_from_the_text_in_the_edits_alone(task: str) -> None:
    sample = Rewrite().sample(setting(1200), task, 1)
    text = sample.context.removeprefix("Here is a text.\n\n")
    before, after = text.split(". "), sample.answers[0].split(". ")
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert [f"{new}." for _, new in changed] == list(sentences(sample, "edits"))
    assert sample.max_new_tokens > trained()(sample.answers[0])


@pytest.mark.parametrize("task", Rewrite.tasks)
def test_edits_and_facts_take_turns_at_even_depths(task: str) -> None:
    sample = Rewrite().sample(setting(4000), task, 0)
    pairs = zip(sentences(sample, "edits"), sentences(sample, "kept"), strict=True)
    order = [sentence for pair in pairs for sentence in pair]
    places = [sample.answers[0].index(sentence) / len(sample.answers[0]) for sentence in order]
    assert all(abs(place - (i + 0.5) / 16) < 0.05 for i, place in enumerate(places))


@pytest.mark.parametrize(
    ("reply", "edits", "kept"),
    [
        ("Now a. Still c. Now b. Still d.", 1, 1),
        ("Now\na.  Still c. Now b. Still\n\nd.", 1, 1),
        ("Now a. Still c. Still d.", 1 / 2, 1),
        ("Now a. Now b. Still e.", 1, 0),
        ("", 0, 0),
    ],
)
def test_the_score_is_the_product_of_both_shares(reply: str, edits: float, kept: float) -> None:
    assert share(SAMPLE, "edits", reply) == edits
    assert share(SAMPLE, "kept", reply) == kept
    assert Rewrite().score(SAMPLE, reply) == edits * kept
