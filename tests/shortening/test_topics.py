"""`topics`: the model's own words on each topic, marked as such, within the target, with what must stay verbatim."""

from __future__ import annotations

from typing import Any

import pytest

from kvfold.errors import PolicyError, SizeError
from kvfold.models.loader import Model
from kvfold.policy import Policy
from kvfold.shortening.loaded_model import LoadedModel
from kvfold.shortening.selectors.topics import _whole_sentences
from kvfold.shortening.shorten import Shortened, shorten_text
from kvfold.shortening.text import plan_of

SHIPS = "The ship Vega left the harbour with grain. The ship waited nine days for the ice. The ship carries X-42b7. "
BREAD = "The baker mixes rye flour with water. The dough rests for a night. Bread is sold at six by the baker. "
TEXT = SHIPS * 3 + BREAD * 3


def shortened(
    told: LoadedModel, text: str = TEXT, to: str = "3x", by: str = "topics(topic=256)", **more: Any
) -> Shortened:
    plan = plan_of(by, to, more.pop("keep", "ids"))
    return shorten_text(text, plan, tokenizer=told.model.tokenizer, model=told, **more)


def test_it_says_that_it_is_not_extractive_and_keeps_what_must_stay(model: Model) -> None:
    told, reports = LoadedModel(model), []
    found = shortened(told, progress=lambda *report: reports.append(report))
    assert not found.is_extractive and found.spans == () and found.original == TEXT
    assert "X-42b7" in found.text.splitlines()
    assert 0 < found.num_tokens <= found.num_original_tokens / 3 + 1
    assert reports and reports[-1][0] == reports[-1][1] == len(reports) > 1
    assert found.text == shortened(told).text
    assert model.arena.used_bytes == 0


def test_topics_stand_in_the_order_of_the_text(model: Model) -> None:
    """A kept span follows the summary of its own topic."""
    text = SHIPS * 4 + (BREAD * 4).replace("rye", "K-77c1")
    found = shortened(LoadedModel(model), text).text
    assert 0 <= found.index("X-42b7") < found.index("K-77c1")
    swapped = shortened(LoadedModel(model), (BREAD * 4).replace("rye", "K-77c1") + SHIPS * 4).text
    assert 0 <= swapped.index("K-77c1") < swapped.index("X-42b7")


def test_the_ends_of_a_message_stay_around_the_summaries(model: Model) -> None:
    text = f"Read what follows.\n\n{TEXT}\n\nWhich ship left first?"
    found = shortened(LoadedModel(model), text, keeps_ends=True)
    assert found.text.startswith("Read what follows.\n\n") and found.text.endswith("\n\nWhich ship left first?")
    assert found.num_tokens <= found.num_original_tokens / 3 + 1


def test_sizes_without_room_for_a_summary_are_refused(model: Model) -> None:
    told = LoadedModel(model)
    with pytest.raises(SizeError, match=r"a summary takes 32 tokens at least, and \d+ of 40 are left"):
        shortened(told, to="40tok")
    with pytest.raises(SizeError, match=r"what must stay \(ids\) is \d+ tokens"):
        shortened(told, to="8tok")
    with pytest.raises(PolicyError, match="topics: topic is at least 128 tokens, not 5"):
        Policy.parse("shorten(topics(5), 4x)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two and th", "One."),
        ("One. Two.", "One. Two."),
        ("No end at all", "No end at all"),
        ('He said "no." Then', 'He said "no."'),
        ("Version 1.5 is ou", "Version 1.5 is ou"),
        ("", ""),
    ],
)
def test_a_sentence_that_was_cut_off_goes(text: str, expected: str) -> None:
    assert _whole_sentences(text) == expected
