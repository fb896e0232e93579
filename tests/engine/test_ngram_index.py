"""The index finds what a plain scan finds, and drafts are as long as matches and luck allow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.engine.speculate import MOST_DRAFTED, Drafter, Match, NgramIndex, check_speculation
from kvfold.errors import InputError

WORDS = ["Knock", ",", "knock", "!", "Who", "'s", "there", "?"]


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_knock_knock() -> None:
    """The worked example: the answer to the second knock is that to the first."""
    word = {text: number for number, text in enumerate(WORDS)}
    drafter = Drafter([word[text] for text in [*WORDS, "Knock", ",", "knock", "!"]])
    assert [WORDS[token] for token in drafter.draft(10)] == ["Who", "'s", "there", "?"]


def scan(texts: list[list[int]]) -> Iterator[Match]:
    """Every earlier place of the last pair, the latest first; matches and pairs stay within their text."""
    flat = [token for text in texts for token in [*text, -1]][:-1]
    for place in range(len(flat) - 1, 1, -1):
        length = 0
        while length < min(place, 64) and flat[place - 1 - length] == flat[-1 - length] != -1:
            length += 1
        if length >= 2:
            yield Match(place, length)


@given(st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=4))
def test_the_index_finds_what_a_scan_finds(texts: list[list[int]]) -> None:
    lookup = NgramIndex()
    for number, text in enumerate(texts):
        if number:
            lookup.end_text()
        lookup.extend(text)
    places = list(scan(texts))[:16]
    assert lookup.find() == max(places, key=lambda match: match.length, default=None)  # the first of equals


def test_a_long_match_is_found_at_every_step() -> None:
    """The index grows by one token at a time and never has to look at the rest again."""
    text, lookup = [i * i % 997 for i in range(400)], NgramIndex()
    lookup.extend(text)
    for step, token in enumerate(text[:80], 1):
        lookup.add(token)
        if step > 1:
            assert lookup.find() == Match(step, min(step, 64))


def test_a_copy_of_what_is_being_written_goes_round() -> None:
    lookup = NgramIndex(ids("xabcabc"))
    match = lookup.find()
    assert match == Match(4, 3)
    assert lookup.continuation(match.source, 7) == ids("abcabca")


def test_no_draft_runs_from_one_text_into_the_next() -> None:
    drafter = Drafter(ids("so one two"), earlier=[ids("two three"), ids("one twofold")])
    assert drafter.draft(16) == ids("fold")
    assert Drafter(ids("so one two"), earlier=[ids("one two"), ids("fold")]).draft(16) == []


def test_a_draft_is_as_long_as_its_match() -> None:
    text = "the sea is wide and deep"
    for length in (2, 5, 9):
        assert Drafter(ids(f"{text} | {text[:length]}")).draft(100) == ids(text[length : 2 * length])
    assert Drafter(ids(f"{text} | {text[:9]}"), 4).draft(100) == ids(text[9:13])
    assert Drafter(ids(f"{text} | {text[:9]}")).draft(3) == ids(text[9:12])
    assert Drafter(ids(f"{text} | {text[:9]}")).draft(0) == []
    assert len(Drafter(ids(text * 9)).draft(100)) == MOST_DRAFTED


def test_bad_luck_shortens_drafts_and_good_luck_brings_them_back() -> None:
    text = "the sea is wide and deep"
    drafter = Drafter(ids(f"{text} | {text[:12]}"))
    for _ in range(40):
        drafter.update(4, 0)
    assert drafter.draft(100) == ids(text[12:13])  # a match of 12 is still worth a token
    assert Drafter(ids(f"{text} | {text[:3]}")).draft(100) != []
    weak = Drafter(ids(f"{text} | {text[:3]}"))
    weak.rate = drafter.rate
    assert weak.draft(100) == []
    for _ in range(40):
        drafter.update(1, 1)
    assert drafter.draft(100) == ids(text[12:23])  # the rate approaches 1 from below


def test_drafts_end_before_tokens_that_end_texts() -> None:
    assert Drafter(ids("abcd.efgh abcd"), never=frozenset(ids("e"))).draft(16) == ids(".")


@pytest.mark.parametrize("speculate", [0, -1, "8", 2.0, None])
def test_what_speculate_may_be(speculate: bool | int) -> None:
    with pytest.raises(InputError, match=r"speculate is .*; write True, False, or how many tokens"):
        check_speculation(speculate, ())


def test_outputs_to_draft_from_want_speculation() -> None:
    with pytest.raises(InputError, match="but speculate is off"):
        check_speculation(False, [[1, 2]])
    check_speculation(True, [[1, 2]])
    check_speculation(3, ())
