"""A context: a text, facts about it, values that questions name, and the files it came from."""

from __future__ import annotations

import pytest

from kvfold.errors import InputError
from kvfold.recurse.context import Context


def test_variables_stand_for_their_values_and_doubled_braces_for_themselves() -> None:
    context = Context("text", variables={"name": "{Rosa}"})
    assert context.fill("Who is {name}, and what are {{this}}, {} and {a b}?") == (
        "Who is {Rosa}, and what are {this}, {} and {a b}?"
    )


@pytest.mark.parametrize(("variables", "told"), [({}, "there are no variables"), ({"name": "x"}, "variables: name")])
def test_a_name_without_a_value_is_told(variables: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=rf"names {{who}}, which is no variable of the context \({told}\); write"):
        Context("text", variables=variables).fill("Is {who} here?")


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


@pytest.mark.parametrize("text", [5, b"x", None])
def test_a_text_is_a_string(text: object) -> None:
    with pytest.raises(InputError, match=f"of type {type(text).__name__}; give a string"):
        Context(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [["a"], {"n": 3}, {3: "n"}, "abc"])
@pytest.mark.parametrize("name", ["metadata", "variables"])
def test_metadata_and_variables_are_strings_by_name(name: str, values: object) -> None:
    with pytest.raises(InputError, match=f"{name} of a context are a dict of strings"):
        Context("text", **{name: values})  # type: ignore[arg-type]
