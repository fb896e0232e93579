"""Parts by layout: they cover any text, and each kind by example."""

from __future__ import annotations

import pytest
from hypothesis import given

from kvfold.shortening.parts import ends_paragraph, parts_of
from kvfold.shortening.shorten import end_parts, end_text
from kvfold.shortening.tokens import TokenOffsets
from tests.shortening.texts import CHINESE, LONG_WORD, MARKDOWN, PROSE, texts


def told(text: str) -> list[tuple[str, str]]:
    return [(part.kind, text[part.start : part.end].strip()) for part in parts_of(text)]


@given(text=texts())
def test_parts_cover_the_text(text: str) -> None:
    parts = parts_of(text)
    assert "".join(text[part.start : part.end] for part in parts) == (text if text.strip() else "")
    assert all(text[part.start : part.end].strip() for part in parts[1:])


@pytest.mark.parametrize("line_end", ("\n", "\r\n"))
def test_layout_of_markdown(line_end: str) -> None:
    found = told(MARKDOWN.replace("\n", line_end))
    assert [(kind, text.replace(line_end, "\n")) for kind, text in found] == [
        ("heading", "# Install"),
        ("sentence", "Run this first:"),
        ("code", "```sh\npip install thing  # never as root\n\nthing --check\n```"),
        ("heading", "## Options"),
        ("item", "- `--fast` skips checks"),
        ("item", "- `--slow` does not\n  and says so"),
        ("row", "| name | size |"),
        ("row", "|---|---|"),
        ("row", "| a | 1 |"),
        ("row", "| b | 2 |"),
        ("heading", "Usage\n-----"),
        ("sentence", "See https://example.org/docs for more."),
        ("sentence", "Ask id X-42b7 if it fails."),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("He met Dr. Lee at 5 p.m. on Monday. Then he left.", ["He met Dr. Lee at 5 p.m. on Monday.", "Then he left."]),
        ("It cost 3.2 million. It was new! Was it?", ["It cost 3.2 million.", "It was new!", "Was it?"]),
        ("A line that\nis wrapped. Another\none.", ["A line that\nis wrapped.", "Another\none."]),
        (CHINESE, ["港口在一月结冰。", "船只等了九天！", "没有人料到会结冰？", "市长请求破冰船。"]),
        ("他说：“走吧。”然后离开了。", ["他说：“走吧。”", "然后离开了。"]),
    ),
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert told(text) == [("sentence", one) for one in expected]


@pytest.mark.parametrize(
    ("text", "kind"),
    (
        ("Terms and Conditions", "heading"),
        ("ends with a mark.", "sentence"),
        ("Chapter 1\n=========", "heading"),
        ("###### Six", "heading"),
        ("#hashtag is none", "sentence"),
        ("12) twelve", "item"),
        ("* star", "item"),
        ("a\tb\tc", "row"),
        ("~~~\nno end", "code"),
    ),
)
def test_kinds_of_lines(text: str, kind: str) -> None:
    assert told(text) == [(kind, text)]


def test_a_fence_hides_layout_and_ends_with_its_own_mark() -> None:
    text = "````\n# no heading\n~~~\n\n- no item\n```` \nAfter it. "
    assert told(text) == [("code", "````\n# no heading\n~~~\n\n- no item\n````"), ("sentence", "After it.")]


def test_what_has_no_end_is_cut_at_white_space() -> None:
    lengths = [part.end - part.start for part in parts_of(LONG_WORD)]
    assert max(lengths) <= 2000 and lengths[0] == 2000  # of 5000 letters
    words = "".join(LONG_WORD[part.start : part.end].rstrip() + "|" for part in parts_of("b c " * 1200))
    assert " |" not in words and words.count("|") == 3


def test_where_paragraphs_end() -> None:
    parts = parts_of(PROSE)
    assert [ends_paragraph(PROSE, part) for part in parts].count(True) == 2
    crlf = PROSE.replace("\n", "\r\n")
    assert [ends_paragraph(crlf, part) for part in parts_of(crlf)].count(True) == 2


def test_the_ends_of_a_message() -> None:
    text = f"Read this first. {PROSE}\nPlease answer. Which ship left first?"
    parts, tokens = parts_of(text), TokenOffsets.of(text)
    kept = [
        text[part.start : part.end].strip()
        for part, keep in zip(parts, end_parts(text, parts, tokens), strict=True)
        if keep
    ]
    assert kept == ["Read this first.", "Please answer.", "Which ship left first?"]
    assert end_text(text) == "Please answer. Which ship left first?"
    assert end_text("Only this?") == "Only this?" and end_text("") == ""
    long = "Start here. " + "Words follow words. " * 200 + "Why?"
    assert end_text(long).endswith("Why?") and 100 < len(TokenOffsets.of(end_text(long))) <= 128


def test_one_sentence_a_line() -> None:
    text = "Lamp 1 was lit at dusk.\nLamp 2 is broken.\nIt was carried\nto the shed.\n3 lamps are left."
    found = [text[part.start : part.end] for part in parts_of(text)]
    assert found == [
        "Lamp 1 was lit at dusk.\n",
        "Lamp 2 is broken.\n",
        "It was carried\nto the shed.\n",
        "3 lamps are left.",
    ]
