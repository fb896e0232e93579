"""Facts are sentences of the turn, word for word, whatever the turn is."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import InputError
from kvfold.memory import Memory
from kvfold.memory.extract import clean, fact_spans, question_in
from kvfold.memory.fact import MAX_TEXT
from tests.memory.conftest import MakeMemory

TURN = """# My notes

Hi! I live in Berlin with my dog. Where do you live? "Who knows?"

- The code of the cellar is 4817.
- Anna works at Bosch
```python
print("no fact")
```
Yes.

My cat is called Tom. I am 30
"""


def test_sentences_and_items_are_facts_and_questions_code_and_headings_are_none() -> None:
    found = [TURN[span.start : span.end] for span in fact_spans(TURN)]
    items = ["- The code of the cellar is 4817.", "- Anna works at Bosch"]
    assert found == ["I live in Berlin with my dog.", *items, "My cat is called Tom.", "I am 30"]


def test_the_questions_of_a_turn_are_looked_up() -> None:
    assert question_in("I am tired. Where is Rex? He is old. And who is he? Thanks.") == "Where is Rex? And who is he?"
    assert question_in("One. Two is it. Three is it") == "Two is it. Three is it" and question_in(" ") == ""


@given(st.text(max_size=300))
@settings(max_examples=50, deadline=None)
def test_facts_are_spans_of_any_turn(text: str) -> None:
    spans = fact_spans(clean(text))
    assert all(start < end <= len(text) for start, end in spans)
    assert all(before.end <= behind.start for before, behind in pairwise(spans))
    assert all(text[start:end].strip() == text[start:end] for start, end in spans)


@pytest.mark.parametrize("text", ["word " * 3000 + "end.", "- " + "xx yyy " * 900, "a b" * 5000])
def test_what_is_too_long_for_a_fact_is_cut(text: str) -> None:
    spans = fact_spans(text)
    assert max(end - start for start, end in spans) <= MAX_TEXT
    assert sum(end - start for start, end in spans) > 0.9 * len(text)


@given(st.lists(st.text(min_size=1, max_size=60), max_size=6), st.floats(-1e10, 1e10))
@settings(max_examples=20, deadline=None)
def test_what_is_exported_is_imported(turns: list[str], at: float) -> None:
    with TemporaryDirectory() as folder:
        first = Memory(Path(folder) / "a.db", "anna", embedder="hashed")
        second = Memory(Path(folder) / "b.db", "anna", embedder="hashed")
        with first, second:
            for number, turn in enumerate(turns):
                first.add(f"I live in {turn}. {turn}", at=at + number, source="chat")
            lines = first.export()
            assert second.load(lines) == len(first.facts())
            assert second.export() == lines and second.load(lines) == 0


LINE = {"id": 1, "text": "a b", "source": "", "span": [0, 3], "valid_from": "2026-01-01", "valid_to": None}
LINE |= {"importance": 1, "uses": 0, "supersedes": None}


@pytest.mark.parametrize(
    "change",
    [
        *({"text": 5}, {"text": "x" * 3000}, {"span": [0]}, {"span": [-1, 4]}, {"valid_from": "May"}, {"uses": 1e99}),
        *({"importance": float("nan")}, {"importance": 0}, {"valid_to": 7}, {"supersedes": "1"}, {"id": True}),
        *({"importance": True}, {"importance": "1"}, {"text": " "}, {"span": [3, 0]}, {"valid_to": "2025-12-31"}),
        *({"supersedes": 1}, {"span": None}),
    ],
)
def test_a_line_that_is_no_fact_stops_an_import(make: MakeMemory, change: dict[str, object]) -> None:
    memory = make()
    assert memory.load(json.dumps(LINE)) == 1
    with pytest.raises(InputError, match=r"line 3 is no fact of kvfold memory export .*; nothing was imported"):
        memory.load("\n".join([json.dumps(LINE | {"text": "c d", "id": 2}), "", json.dumps(LINE | change)]))
    with pytest.raises(InputError, match="line 1 is no fact"):
        memory.load("[" * 100_000)
    assert len(memory.facts()) == 1


def test_a_line_that_stands_twice_is_one_fact_and_an_id_is_of_one_line(make: MakeMemory) -> None:
    memory = make()
    assert memory.load("\n".join(json.dumps(LINE | {"id": number}) for number in (1, 2))) == 1
    with pytest.raises(InputError, match="line 2 has the id 1 of an earlier line; nothing was imported"):
        memory.load("\n".join(json.dumps(LINE | {"text": text}) for text in ("c d", "e f")))
    assert [fact.text for fact in memory.facts()] == ["a b"]


@pytest.mark.parametrize("line", ["5", "null", "[1, 2]", '"a"', "{}"])
def test_what_is_no_object_is_told_in_plain_words(make: MakeMemory, line: str) -> None:
    with pytest.raises(InputError, match=r"line 1 is no fact of kvfold memory export \(no (JSON object|'span')\)"):
        make().load(line)
