"""The filler text: seeded, varied, with numbers of many lengths; and the sentences of a text of one's own."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from random import Random
from string import Formatter

import pytest

from kvfold.bench.haystack import ANY, NUMBERED, NUMBERS, TOPICS, WORDS, Topic, from_text, prose, read_text
from kvfold.errors import InputError


def _sentences(seed: int, count: int) -> list[str]:
    return list(islice(prose(Random(seed)), count))


def test_same_seed_same_prose() -> None:
    assert _sentences(3, 50) == _sentences(3, 50)
    assert len(set(_sentences(3, 50)) & set(_sentences(4, 50))) < 5


def test_prose_does_not_repeat() -> None:
    found = _sentences(0, 2000)
    assert len(set(found)) == len(found)


def test_numbers_are_as_common_and_as_long_as_what_is_hidden_among_them() -> None:
    """Needles are numbers of seven digits; a score that finds digits must not find them by that alone."""
    found = _sentences(0, 2000)
    numbers = [number for sentence in found for number in re.findall(r"\d+", sentence)]
    assert 0.2 < sum(any(map(str.isdigit, sentence)) for sentence in found) / len(found) < 0.3
    assert {len(number) for number in numbers} == set(range(1, 8))
    assert sum(len(number) == 7 for number in numbers) > 50


def test_sentences_are_capitalised_and_end() -> None:
    for sentence in _sentences(1, 500):
        assert sentence[0].isupper() and sentence.endswith(".") and "{" not in sentence
        assert sentence == " ".join(sentence.split())


def test_prose_varies() -> None:
    """A prompt of a few thousand tokens visits most topics and opens its sentences in many ways."""
    found = _sentences(2, 200)
    openings = {tuple(sentence.split()[:3]) for sentence in found}
    assert len(openings) > 100
    visited = [topic for topic in TOPICS if any(where in sentence for where in topic.where for sentence in found)]
    assert len(visited) >= len(TOPICS) // 2


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.where[0])
def test_patterns_name_known_words(topic: Topic) -> None:
    names = {"who", "who_", "where", "what", "name2", *WORDS, *NUMBERS}
    patterns = [*ANY, *NUMBERED, *topic.patterns]
    used = {name for pattern in patterns for _, name, _, _ in Formatter().parse(pattern) if name is not None}
    assert used <= names


def test_words_after_an_article_start_with_a_consonant() -> None:
    assert not [word for word in (*WORDS["quality"], *WORDS["colour"]) if word[0] in "aeiou"]


def test_text_is_read_in_order_and_round() -> None:
    found = list(islice(from_text("One is here.  Two\nfollows! Three?")(Random(0)), 7))
    assert sorted(set(found)) == ["One is here.", "Three?", "Two follows!"]
    order = ["One is here.", "Two follows!", "Three?"] * 4
    start = order.index(found[0])
    assert found == order[start : start + 7]


def test_empty_text_is_refused() -> None:
    with pytest.raises(InputError, match="no sentence"):
        from_text(" \n ")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    (
        ("a.txt", '{"text": "as it is"}', '{"text": "as it is"}'),
        ("a.json", json.dumps({"text": "\n\nOne. Twö.\n"}), "One. Twö."),
        ("a.json", json.dumps([{"text": "One."}, {"text": "Two.", "title": "second"}]), "One.\n\nTwo."),
    ),
)
def test_plain_text_and_essays_are_read(tmp_path: Path, name: str, content: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert read_text(path) == text


@pytest.mark.parametrize("content", ("no json", '"a string"', '{"body": "x"}', '{"text": 3}', '[{"text": "x"}, null]'))
def test_json_that_holds_no_essays_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(InputError, match="no JSON of essays"):
        read_text(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is UTF-16; convert it"):
        read_text(path)
