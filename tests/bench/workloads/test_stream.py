"""The stream: lines in order, a question every ten lines about the line twenty back, right answers to earlier ones."""

from __future__ import annotations

import re

import pytest

from kvfold.bench.workloads import Sample
from kvfold.bench.workloads.stream import Stream
from kvfold.errors import InputError
from tests.bench.workloads.tokens import setting

LINE = re.compile(r"^line (\d+): register <(\d+)>$", re.MULTILINE)
ASKED = re.compile(
    r"^Question: what is the register of line (\d+)\?\nThe register of line \1 is <(\d+)>$", re.MULTILINE
)


def lines(sample: Sample) -> dict[int, str]:
    return {int(line): register for line, register in LINE.findall(sample.context)}


@pytest.mark.parametrize("index", range(3))
def test_the_answer_stands_twenty_lines_back(index: int) -> None:
    sample = Stream().sample(setting(2000), "lines", index)
    found = lines(sample)
    last = max(found)
    assert last % 10 == 0 and sorted(found) == list(range(min(found), last + 1))
    assert sample.question == f"Question: what is the register of line {last - 20}?"
    assert sample.answers == (found[last - 20],)


def test_every_ten_lines_a_question_was_answered_rightly() -> None:
    sample = Stream().sample(setting(3000), "lines", 0)
    found, asked = lines(sample), ASKED.findall(sample.context)
    assert len(asked) >= 5
    assert [int(line) for line, _ in asked] == [max(found) - 30 - 10 * back for back in range(len(asked))][::-1]
    assert all(found.get(int(line), register) == register for line, register in asked)
    for line, _ in asked[1:]:  # each right after the line that it is twenty away from
        assert re.search(
            rf"^line {int(line) + 20}: .*\nQuestion: what is the register of line {line}\?", sample.context, re.M
        )


def test_a_stream_too_short_for_the_answer_is_refused() -> None:
    with pytest.raises(InputError, match="prompts of 200 tokens are too short for lines"):
        Stream().sample(setting(200), "lines", 0)


@pytest.mark.parametrize(("reply", "score"), [("4821>", 1), ("4821>\nline 9:", 1), ("1, 4821", 0), ("", 0)])
def test_the_first_number_counts(reply: str, score: float) -> None:
    assert Stream().score(Sample("lines", 0, "", "", ("4821",), 8), reply) == score
