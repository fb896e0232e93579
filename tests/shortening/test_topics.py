"""`topics`: the model's own words on each topic, marked as such, within the target, with what must stay verbatim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvfold.errors import PolicyError, SizeError
from kvfold.models.loader import Model
from kvfold.policy import Policy
from kvfold.shortening.base import Task
from kvfold.shortening.embedders.hashed import HashedTfIdf
from kvfold.shortening.loaded_model import LoadedModel
from kvfold.shortening.parts import parts_of
from kvfold.shortening.selectors.topics import Topics, _whole_sentences
from kvfold.shortening.shorten import Shortened, shorten_text
from kvfold.shortening.text import plan_of
from kvfold.shortening.tokens import TokenOffsets
from tests.shortening.texts import long_text

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


def test_topics_attend_to_few_pairs_of_tokens() -> None:
    """L = 32,768 tokens in groups of 512, and the eighth that is left, are 512 L + (L / 8)² pairs: 16.78 million
    each, against L² = 1,073.7 million. Topics are longer and shorter than 512 tokens, and nearly as cheap."""
    length = 32_768
    text = long_text(200_000)
    text = text[: TokenOffsets.of(text).starts[length]]
    parts, tokens = parts_of(text), TokenOffsets.of(text)
    kept_n = np.zeros(len(parts), dtype=bool)
    task = Task(text, parts, parts, kept_n, tokens, length // 8, None, HashedTfIdf())
    found = Topics(topic=512)._parts(task, parts, task.target)
    groups = [sum(tokens.count(*block) for block in topic.blocks) for topic in found]
    assert sum(groups) == length and max(groups) <= 2 * 512 + 128
    assert 0.95 * task.target < sum(topic.num_tokens for topic in found) <= task.target
    even = 512 * length + (length // 8) ** 2
    pairs = sum(group**2 for group in groups) + sum(topic.num_tokens for topic in found) ** 2
    assert length**2 / even == 32.0 and len(set(groups)) > 10 and pairs == pytest.approx(even, rel=0.1)


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
