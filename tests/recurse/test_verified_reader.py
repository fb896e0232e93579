"""A reader that checks replies: what it asks again, what it counts, and that bounds hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvfold.errors import InputError
from kvfold.recurse.budget import Budget
from kvfold.recurse.calls import Prompt
from kvfold.recurse.chunks import Chunk
from kvfold.recurse.context import Context
from kvfold.recurse.journal import Recorded
from kvfold.recurse.pieces import chunk_pieces
from kvfold.recurse.verified_reader import VerifiedReader, refusal
from tests.recurse.texts import QUESTION, document, long_model

MODEL = long_model()


def _reader(**options: object) -> VerifiedReader:
    merged = {"chunk": 200, "max_new_tokens": 4, **options}
    return VerifiedReader(MODEL, Context(document()), QUESTION, **merged)  # type: ignore[arg-type]


def test_replies_that_are_not_in_the_text_are_sampled_again_and_counted() -> None:
    """Replies of random weights are noise: nearly all are refused, each is retried."""
    asked: list[Prompt] = []
    with _reader(max_retries=2) as reader:
        batches = reader.calls.batches

        def noted(prompts: Sequence[Prompt], **more: object) -> object:
            asked.extend(prompts)
            return batches(prompts, **more)  # type: ignore[arg-type]

        reader.calls.batches = noted  # type: ignore[method-assign,assignment]
        result = reader.read()
        report = reader.report
    assert report.refused > 0
    assert report.retries == sum(prompt.temperature > 0 for prompt in asked) > 0
    assert {prompt.seed for prompt in asked if prompt.temperature} <= {1, 2}
    assert result.num_dropped == report.refused - report.recovered
    assert report.tokens_wasted > 0
    assert result.checks == report.as_json()
    assert result.usage.calls == len(asked)
    assert MODEL.arena.used_bytes == 0


def test_without_retries_it_is_a_plain_reader() -> None:
    with _reader(max_retries=0) as reader:
        result = reader.read()
    assert result.checks is not None
    assert (result.checks["retries"], result.checks["recovered"]) == (0, 0)
    assert result.num_dropped == result.checks["refused"]


@pytest.mark.parametrize("calls", [3, 6])
def test_retries_stay_within_the_budget_and_leave_a_call_for_the_merge(calls: int) -> None:
    with _reader(budget=Budget(calls=calls)) as reader:
        result = reader.read()
    assert result.usage.calls <= calls


def test_a_reply_is_refused_by_its_quotes_or_its_arithmetic() -> None:
    text = "The roof cost 300 crowns and the door cost 45 crowns."
    assert refusal('It says "roof cost 300 crowns", so 300 + 45 = 345.', text) is None
    assert refusal("300 + 45 = 355", text) == "300 + 45 = 355 is wrong: 300 + 45 is 345"
    assert refusal('It says "the roof cost 200 crowns"', text) == '"the roof cost 200 crowns" is not in the text'


def test_an_answer_that_leaves_words_out_is_refused_by_the_arithmetic_of_its_sentence() -> None:
    text = "The roof and the door cost 300 + 45 = 355 crowns, Bo said."
    context = Context(text)
    (piece,) = chunk_pieces(context, [Chunk(0, len(text), 20)])
    with VerifiedReader(MODEL, context, "What did they cost?", max_new_tokens=4) as reader:
        refusals = {
            reply: reader._refusal(piece, piece.node(context, reader.question, Recorded(reply, 20, is_cut=False)))
            for reply in ("355 crowns", "Bo said")
        }
    assert refusals == {"355 crowns": "300 + 45 = 355 is wrong: 300 + 45 is 345", "Bo said": None}


def test_a_negative_number_of_retries_is_refused() -> None:
    with pytest.raises(InputError, match="max_retries is -1"):
        _reader(max_retries=-1)
