"""Metrics on hand-made replies. Numbers of ROUGE-L and code similarity are those of the packages LongBench uses."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvfold.bench.workloads import metrics
from kvfold.bench.workloads.metrics import (
    first_digits,
    first_number,
    last_digits,
    match_all,
    match_part,
    split_words,
)
from kvfold.errors import MissingExtra


def test_normalisation_is_that_of_squad() -> None:
    assert metrics.normalise("  The Cat's  hat, and a THEME!\n") == "cats hat and theme"


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("The red house", "red house", 1),
        ("the big red house", "red barn", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        ("red red red", "red red", 2 * (2 / 3) * 1 / (2 / 3 + 1)),  # each word as often as it occurs in both
        ("blue", "red", 0),
        ("", "red", 0),
        ("the", "a", 0),  # articles alone are nothing
    ],
)
def test_token_f1(reply: str, answer: str, score: float) -> None:
    assert metrics.token_f1(reply, answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("reply", "reference", "score"),
    [
        ("the cat sat on the mat", "the cat lay on a mat", 0.7272727223140496),
        ("the cat sat. it purred all day", "it purred. the black cat sat all day", 0.9333333283555556),
        ("a b c. c d e. ", "c b a. e d", 0.5454545404958678),  # the space at the end counts as a word
        ("one. two. three", "three two one", 0.999999995),  # order counts within sentences only
        ("day night day night", "night day", 0.999999995),  # each word counts once
        ("alpha", "beta", 0.0),
    ],
)
def test_rouge_l_is_that_of_the_rouge_package(reply: str, reference: str, score: float) -> None:
    assert metrics.rouge_l(reply, reference) == pytest.approx(score, abs=1e-7)


@pytest.mark.parametrize("reply", ["", "...", "."])
def test_rouge_l_of_nothing_is_zero(reply: str) -> None:
    assert metrics.rouge_l(reply, "a summary") == 0


def test_rouge_l_of_a_perfect_summary_is_one() -> None:
    assert metrics.rouge_l("First this. Then that.", "First this. Then that.") == 1


def test_of_several_longest_subsequences_the_end_decides() -> None:
    assert metrics.common_subsequence("abcbdab", "bdcaba") == list("bdab")
    assert metrics.common_subsequence("ab", "ba") == ["b"]
    assert metrics.common_subsequence("ab", "") == []


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Date", 1),
        ("It is a Date, or Food", 1 / 2),
        ("Food", 0),
        ("date", 0),
        ("", 0),
    ],
)
def test_classification_shares_among_the_named(reply: str, score: float) -> None:
    assert metrics.classification(reply, "Date", ["Food", "Date", "Other"]) == score


def test_classification_drops_parts_of_the_right_class_but_skips_the_next() -> None:
    assert metrics.classification("Date of birth", "Date of birth", ["Date", "Date of birth"]) == 1
    assert metrics.classification("abc", "abc", ["a", "b", "abc"]) == 1 / 2  # without the skip it would be 1
    assert metrics.classification("Date of birth", "Date", ["Date", "Date of birth"]) == 1 / 2


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("Paragraph 12", "Paragraph 12", 1),
        ("12 or 13", "Paragraph 12", 1 / 2),
        ("Paragraph 1", "Paragraph 12", 0),
        ("段落3", "段落3", 1),
        ("There are 7", "7", 1),
        ("07", "7", 0),  # numbers are compared as text
        ("none", "7", 0),
    ],
)
def test_number_share(reply: str, answer: str, score: float) -> None:
    assert metrics.number_share(reply, answer) == score


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("total = total + 1", 1),
        ("\n\n```python\n# add\ntotal = total + 1\nmore()", 1),  # the first line that is code
        ("total = total + 2", 0.94),
        ("value = total", 0.67),
        ("// total = total + 1", 0),
        ("", 0),
    ],
)
def test_code_similarity_is_that_of_fuzzywuzzy(reply: str, score: float) -> None:
    assert metrics.code_similarity(reply, "total = total + 1") == score


def test_a_right_line_with_a_comment_is_not_seen() -> None:
    line = "total += 1  # one more"
    assert metrics.code_similarity(line, line) == 0


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("The correct answer is (B)", 1),
        ("Well. The correct answer is **B**, since", 1),
        ("The correct answer is (A). No: The correct answer is (B)", 0),  # the first counts
        ("The correct answer is A. The correct answer is (B)", 1),  # but brackets come first
        ("B", 0),
        ("the correct answer is (B)", 0),
        ("", 0),
    ],
)
def test_choice(reply: str, score: float) -> None:
    assert metrics.choice(reply, "B") == score


def test_chinese_is_scored_in_words_or_refused_by_name() -> None:
    if find_spec("jieba") is None:
        with pytest.raises(MissingExtra, match=r'jieba.*pip install "kvfold\[longbench\]"'):
            metrics.token_f1_zh("北京", "北京")
    else:
        assert metrics.token_f1_zh("北京，", "北京。") == 1
        assert 0 < metrics.rouge_l_zh("我们在北京开会", "他们在北京开会") < 1


def test_match_all_is_the_share_found_in_whatever_case() -> None:
    assert match_all(("Oak", "elm", "ash", "yew"), "1. oak 2. ELM 3. Ashes") == 0.75
    assert match_all(("12", "34"), "about 1234") == 1  # substrings count
    assert match_all(("12",), "1 2") == 0


def test_match_part_is_whether_any_is_found() -> None:
    assert match_part(("Denver Broncos", "Broncos"), "the broncos won") == 1
    assert match_part(("Denver Broncos", "the Broncos"), "Denver\x00Broncos") == 0


def test_control_characters_are_line_breaks() -> None:
    assert match_all(("one\ntwo",), "one\x07two") == 1


def test_first_and_last_digits_are_read_as_written() -> None:
    assert first_digits("key 00412, not 9") == "00412" and last_digits("from <7> to <0042>.") == "0042"
    assert first_digits("none") == last_digits("none") == ""
    assert first_digits("-12.5") == "12"


@pytest.mark.parametrize(("reply", "number"), [("is 49.5.", 49.5), ("49.", 49), ("a 7 or 8.2", 7), ("none", None)])
def test_first_number_may_be_a_decimal(reply: str, number: float | None) -> None:
    assert first_number(reply) == number


def test_words_are_freed_of_what_wraps_them() -> None:
    assert split_words('{"ab-1": "cd-2"},\nnot, it\'s: x!?') == ["ab-1", "cd-2", "not", "it", "s", "x"]
