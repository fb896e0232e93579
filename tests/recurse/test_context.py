"""A context: a text, facts about it, values that questions name, and the files it came from."""

from __future__ import annotations

import pytest

from kvfold.errors import InputError
from kvfold.recurse.context import Context


def test_variables_stand_for_their_values_and_other_braces_stay() -> None:
    context = Context("text", variables={"name": "Rosa"})
    assert context.fill("Who is {name}, and what is {this}?") == "Who is Rosa, and what is {this}?"


def test_metadata_is_a_line_each_and_part_of_the_digest() -> None:
    plain, told = Context("text"), Context("text", metadata={"Title": "Log"})
    assert (plain.header, told.header) == ("", "Title: Log\n")
    assert plain.digest != told.digest != Context("text2", metadata={"Title": "Log"}).digest


def test_long_metadata_and_empty_texts_are_refused() -> None:
    with pytest.raises(InputError, match="the metadata has 3007 characters; it stands above every part"):
        Context("text", metadata={"Note": "x" * 3000})
    with pytest.raises(InputError, match="the text of a context is empty"):
        Context(" \n")


def test_places_in_files() -> None:
    context = Context.of_files([("a", "one"), ("b", "two")])
    assert context.text == "one\n\ntwo"
    assert [context.place(at) for at in (0, 2, 5, 7)] == [("a", 0), ("a", 2), ("b", 0), ("b", 2)]
    assert Context("one").place(2) == (None, 2)
