"""Labels of documents and speakers stay with anything they name."""

from __future__ import annotations

import pytest

from kvfold.shortening.labels import Labels
from kvfold.shortening.parts import parts_of
from kvfold.shortening.text import shorten

DOCUMENTS = "".join(
    f"Document [{number}]: The {thing} stands in the hall. Rain fell on the roof all day long. Its maker was {maker}, "
    "who came from far away.\n\n"
    for number, (thing, maker) in enumerate([("clock", "Anna"), ("table", "Boris"), ("mirror", "Carla")], 1)
)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("Document [1]: a\n\nDocument [2]: b", ["Document [1]: ", "\n\nDocument [2]: "]),
        ("[1] a\n[2] b", ["[1] ", "\n[2] "]),
        ("Passage 1:\nTitle\n\nText.\nPassage 2:\nMore", ["Passage 1:\n", "\nPassage 2:\n"]),
        ("what they saw in Document [1]: no label within a line", []),
        ("at 10:30 we met", []),
        ("", []),
    ],
)
def test_numbered_labels(text: str, labels: list[str]) -> None:
    found = Labels.numbered(text)
    assert [text[low:high] for low, high in zip(found.start_L, found.end_L, strict=True)] == labels


def test_a_speaker_names_what_follows_up_to_a_blank_line() -> None:
    text = "Anna: Good day. How are you?\nDr. Boris Z: Well.\n\nThey left."
    found = Labels.speakers(text)
    assert [text[low:high] for low, high in zip(found.end_L, found.until_L, strict=True)] == [
        "Good day. How are you?",
        "Well.",
    ]


def test_a_sentence_brings_the_label_of_its_document() -> None:
    short = shorten(DOCUMENTS, "20tok", "tail", keep="none")
    assert "Document [3]: " in short.text and "Its maker was Carla" in short.text
    assert "Document [1]" not in short.text
    assert "The mirror" not in short.text


def test_a_label_begins_a_line() -> None:
    short = shorten(DOCUMENTS, "52tok", "tail", keep="none")
    lines = short.text.strip().splitlines()
    assert [line[:12] for line in lines if line] == ["Document [2]", "Document [3]"]


def test_labels_take_room() -> None:
    for size in range(16, 90, 7):
        assert shorten(DOCUMENTS, f"{size}tok", "graph", keep="none").num_tokens <= size


def test_what_begins_a_line_keeps_its_line() -> None:
    """A heading, an item or code behind a sentence of which only the beginning stays; lists have no blank lines."""
    said = "The river runs fast through the old town of grain. Nobody crosses its bridge of stone at night.\n\n"
    text = f"{said}## Ships\n\n{said}- a red ship\n- a blue ship\n\n{said}```\ncode here\n```\n"
    found = Labels.line_breaks(text, parts_of(text))
    assert [text[low:high] for low, high in zip(found.start_L, found.end_L, strict=True)] == ["\n\n"] * 3
    short = shorten(text, "24tok", "head", keep="headings, code")
    assert short.text == "The river runs fast through the old town of grain. \n\n## Ships\n\n```\ncode here\n```\n"
    assert shorten(text, "13tok", "tail", keep="headings").text == "## Ships\n\n```\ncode here\n```\n"
